"""Triton kernel of `nearest`: for each query, find the key with the largest inner product plus bias.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. The exceptions are cases that the Hopper
kernel supports, or for which XLA is as fast. Results must match `reference.py` up to rounding. Other kernels use its
helpers.

A program has a block of queries and loops over the keys with a running best. Scores stay in registers between the
tensor cores and the comparison.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..triton import backend, entry, triton_call, triton_unsupported
from ..tuning import tuned
from .types import Nearest

LEAST = 16
"""Minimum number of rows or columns of a tensor core matmul."""


def unsupported_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    dim = keys.shape[-1]
    if reason := triton_unsupported(dim=dim):
        return reason
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {queries.dtype} and keys {keys.dtype}"
    return None


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Nearest:
    """Find the key with the largest inner product plus bias; see the public function.

    Args:
        sizes: `queries` per program, `keys` compared at a time, `warps` and `stages`, instead of the tuned sizes.
    """
    *batch, count, dim = queries.shape
    groups, size = math.prod(batch), keys.shape[-2]
    sizes = sizes or _sizes(queries, keys)
    rows, columns = sizes["queries"], sizes["keys"]
    inputs = [queries.reshape(groups, count, dim), keys.reshape(groups, size, dim)]
    if bias is not None:
        inputs.append(bias.reshape(groups, size).astype(jnp.float32))
    outputs = [jax.ShapeDtypeStruct((groups, count), dtype) for dtype in (jnp.float32, jnp.int32)]
    score, place = triton_call(
        functools.partial(_body, rows=rows, columns=columns),
        grid=(groups, pl.cdiv(count, rows)),
        in_specs=[*map(entry, inputs)],
        out_specs=[*map(entry, outputs)],
        out_shape=outputs,
        warps=sizes["warps"],
        stages=sizes["stages"],
        interpret=interpret,
        name="nearest",
    )(*inputs)
    return Nearest(score.reshape(*batch, count), place.reshape(*batch, count))


def _sizes(queries: Float[Array, "*B N H"], keys: Float[Array, "*B M H"]) -> dict[str, int]:
    """Return block sizes: large enough that loading keys is a small part of the work, and small enough for the
    registers.
    """
    *batch, count, dim = queries.shape
    size, wide = keys.shape[-2], queries.dtype.itemsize * dim > 256
    default = {
        "queries": min(128 if wide else 256, block_within(count)),
        "keys": min(64, block_within(size)),
        "warps": 8,
        "stages": 2 if wide else 3,
    }
    case = {"groups": math.prod(batch), "queries": count, "keys": size, "head_dim": dim, "dtype": queries.dtype.name}
    sizes = tuned("nearest", case, default)
    return default if "wgmma" in sizes else sizes  # `wgmma` marks sizes of the Hopper kernel


def block_within(length: int) -> int:
    """Return the largest power of two that is at most `length`, and at least `LEAST`."""
    return max(LEAST, 1 << (length.bit_length() - 1))


def load_rows(ref: Any, start: Array | int, block: int, length: int) -> Array:
    """Load `block` rows of `ref`, with zeros after its first `length` rows."""
    span = ref.at[pl.ds(start, block)]
    if length % block == 0:
        return backend.load(span)
    inside = start + jnp.arange(block, dtype=jnp.int32) < length
    inside = jnp.broadcast_to(inside.reshape(block, *[1] * (span.ndim - 1)), (block, *ref.shape[1:]))
    return backend.load(span, mask=inside, other=jnp.zeros((), ref.dtype))


def products(queries: Float[Array, "N H"], keys: Float[Array, "M H"]) -> Float[Array, "N M"]:
    """Return inner products, accumulated in float32.

    float32 operands are split into three bfloat16 parts, and the tensor cores compute the six significant products.
    Tensor cores cannot multiply float32, and other units take several times as long.
    """
    exact = queries.dtype == jnp.float32
    return jax.lax.dot_general(
        queries,
        keys,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if exact else None,
        preferred_element_type=jnp.float32,
    )


def store_rows(ref: Any, start: Array | int, values: Array, length: int) -> None:
    """Store the values that are within the first `length` rows of `ref`."""
    block = values.shape[0]
    inside = None if length % block == 0 else start + jnp.arange(block, dtype=jnp.int32) < length
    backend.store(ref.at[pl.ds(start, block)], values, mask=inside)


def _body(queries_ref: Any, keys_ref: Any, *refs: Any, rows: int, columns: int) -> None:
    *bias_refs, score_ref, index_ref = refs
    count, size = queries_ref.shape[0], keys_ref.shape[0]
    first = pl.program_id(1) * rows
    queries = load_rows(queries_ref, first, rows, count)
    column = jnp.arange(columns, dtype=jnp.int32)

    def compare(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        score, index = best
        start = j * columns
        scores = products(queries, load_rows(keys_ref, start, columns, size))
        allowed = None if size % columns == 0 else start + column < size
        for bias_ref in bias_refs:
            bias = load_rows(bias_ref, start, columns, size)
            scores += bias
            allowed = bias > -jnp.inf if allowed is None else allowed & (bias > -jnp.inf)
        if allowed is not None:
            scores = jnp.where(allowed, scores, -jnp.inf)
        top = jnp.max(scores, axis=1)
        at = jnp.min(jnp.where(scores == top[:, None], column, columns), axis=1)
        return jnp.maximum(score, top), jnp.where(top > score, start + at, index)

    none = jnp.full((rows,), -jnp.inf, jnp.float32), jnp.zeros((rows,), jnp.int32)
    score, index = jax.lax.fori_loop(0, pl.cdiv(size, columns), compare, none)
    store_rows(score_ref, first, score, count)
    store_rows(index_ref, first, index, count)
