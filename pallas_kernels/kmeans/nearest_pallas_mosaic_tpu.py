"""Mosaic TPU kernel of `nearest`: for each query, find the key with the largest inner product plus bias.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding. `chunk_similarity` uses some of its helpers.

Scores have keys along sublanes and queries along lanes. They are compared eight keys at a time, as whole registers: the
kernel keeps the best of every eighth key, and compares these eight only at the end.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..interpreter import interpreter
from ..products import dot
from ..tuning import tuned
from .types import Nearest

SUBLANES, LANES = 8, 128
"""Rows and columns of a vector register."""


def unsupported_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {queries.dtype} and keys {keys.dtype}"
    return None


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    interpret: bool = False,
) -> Nearest:
    """Find the key with the largest inner product plus bias; see the public function."""
    *batch, count, dim = queries.shape
    groups, size = math.prod(batch), keys.shape[-2]
    case = {"groups": groups, "queries": count, "keys": size, "head_dim": dim, "dtype": queries.dtype.name}
    sizes = tuned("nearest", case, {"queries": 512, "keys": 256})
    lanes, rows = _round_up(min(count, sizes["queries"]), LANES), _round_up(min(size, sizes["keys"]), LANES)
    inputs = [queries.reshape(groups, count, dim), keys.reshape(groups, size, dim)]
    specs = [
        pl.BlockSpec((None, lanes, dim), lambda g, i, j: (g, i, 0)),
        pl.BlockSpec((None, rows, dim), lambda g, i, j: (g, j, 0)),
    ]
    if bias is not None:
        inputs.append(bias.reshape(groups, 1, size).astype(jnp.float32))
        specs.append(pl.BlockSpec((None, 1, rows), lambda g, i, j: (g, 0, j)))
    score, place = pl.pallas_call(
        functools.partial(_body, size=size),
        grid=(groups, pl.cdiv(count, lanes), pl.cdiv(size, rows)),
        in_specs=specs,
        out_specs=[pl.BlockSpec((None, 1, lanes), lambda g, i, j: (g, 0, i))] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((groups, 1, count), jnp.float32),
            jax.ShapeDtypeStruct((groups, 1, count), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((SUBLANES, lanes), jnp.float32), pltpu.VMEM((SUBLANES, lanes), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * groups * count * size * dim,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in inputs) + 8 * groups * count,
        ),
        interpret=interpreter(interpret),
        name="nearest",
    )(*inputs)
    return Nearest(score.reshape(*batch, count), place.reshape(*batch, count))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def column(row: Array, fill: Any = 0) -> Array:
    """Transpose [1, N] to [N, 1]."""
    shape = row.shape[1], row.shape[1]
    diagonal = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.max(jnp.where(diagonal, row, fill), axis=1, keepdims=True)


def _body(queries_ref: Any, keys_ref: Any, *refs: Any, size: int) -> None:
    *bias_refs, score_ref, place_ref, best_ref, group_ref = refs
    j, rows = pl.program_id(2), keys_ref.shape[0]

    @pl.when(j == 0)
    def _() -> None:
        best_ref[...] = jnp.full(best_ref.shape, -jnp.inf, jnp.float32)
        group_ref[...] = jnp.zeros(group_ref.shape, jnp.int32)

    scores = dot(keys_ref[...], queries_ref[...], 1)
    for bias_ref in bias_refs:
        bias = column(bias_ref[...], -jnp.inf)
        scores = jnp.where(bias > -jnp.inf, scores + bias, -jnp.inf)
    if size % rows:
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        scores = jnp.where(row < size - j * rows, scores, -jnp.inf)
    best, group = best_ref[...], group_ref[...]
    for i in range(rows // SUBLANES):
        those = scores[i * SUBLANES : (i + 1) * SUBLANES]
        better = those > best
        best, group = jnp.where(better, those, best), jnp.where(better, j * (rows // SUBLANES) + i, group)
    best_ref[...], group_ref[...] = best, group

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        best, place = best_ref[...], group_ref[...] * SUBLANES
        place += jax.lax.broadcasted_iota(jnp.int32, place.shape, 0)
        top = jnp.max(best, axis=0, keepdims=True)
        first = jnp.min(jnp.where(best == top, place, jnp.iinfo(jnp.int32).max), axis=0, keepdims=True)
        score_ref[...] = top
        place_ref[...] = jnp.where(top > -jnp.inf, first, 0)
