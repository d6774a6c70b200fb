"""Mosaic TPU kernel of `gather_attention`, attention over selected slots of a cache, for whole pages.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding.

Other selections are not supported, because single rows of a tiled array cannot be copied efficiently.

The grid has sequences, selecting heads and groups of pages. The cache is an input once per page of a group. The
pipeline looks up each page's index in advance, and fetches the next step's pages during the current step. Pages after
the last one with a live slot have the index of that page. They are not fetched, since the pipeline does not fetch the
same block twice in a row.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from ..decode_attention import Attended
from ..interpreter import interpreter
from ..masking import MASKED
from ..products import dot
from ..rotary import DeferredRope, heads_of
from .pages import live_slots

LANES = 128

TOKENS = 256
"""Slots per group of pages, enough to hide the copies of one group behind the computation of another."""

PAGES = 8
"""Maximum number of pages per group."""

INDICES = 2**17
"""Maximum number of page indices, which must fit into scalar memory with some room left."""


def unsupported_reason(
    q: Array | DeferredRope, k: Array, v: Array, index: Array, *_: Any, page: int = 1, **__: Any
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    dim = k.shape[-1]
    if page % 16:
        return f"pages of {page} slots are not a multiple of 16, and single slots cannot be copied"
    if dim % LANES and (dim % 16 or page % LANES):
        return f"pages of {page} slots are not a multiple of {LANES}, as a head dim of {dim} requires"
    if k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype}"
    if index.size > INDICES:
        return f"{index.size} page indices are more than the {INDICES} that fit in scalar memory"
    return None


def gather_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    index: Int[Array, "B R P"],
    live: Bool[Array, "B R L"],
    *,
    scale: float,
    page: int = 1,
    tokens: Int[Array, " B"] | None = None,
    interpret: bool = False,
) -> Attended:
    """Softmax attention of each head over the pages that it selected; see the public function."""
    q, live = heads_of(q), live_slots(index, live, page, tokens)
    batch, heads, dim = q.shape
    selecting, pages = index.shape[1:]
    group, shared = heads // selecting, selecting // k.shape[1]
    each = max(1, min(PAGES, TOKENS // page, pages))  # pages per group
    transposed = dim % LANES != 0  # such arrays are stored with slots along lanes

    number = jnp.arange(1, pages + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(jnp.any(live.reshape(*index.shape, page), axis=-1), number, 0), axis=-1)  # [B, R]

    def nth(i: int) -> pl.BlockSpec:
        """Return the block spec of page `i` of each group."""

        def at(b: Any, r: Any, j: Any, index: Any, used: Any) -> Any:
            last = jnp.maximum(used[b * selecting + r] - 1, 0)
            found = index[(b * selecting + r) * pages + jnp.minimum(j * each + i, last)]
            return (b, r // shared, 0, found) if transposed else (b, r // shared, found, 0)

        return pl.BlockSpec((None, None, dim, page) if transposed else (None, None, page, dim), at)

    whole = pl.BlockSpec((None, None, group, dim), lambda b, r, j, *_: (b, r, 0, 0))
    line = pl.BlockSpec((None, None, 1, each * page), lambda b, r, j, *_: (b, r, 0, j))
    if transposed:
        k, v = jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)
    outs = pl.pallas_call(
        partial(
            _body, scale=scale, selecting=selecting, size=live.shape[-1], each=each, page=page, transposed=transposed
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, selecting, pl.cdiv(pages, each)),
            in_specs=[whole, line, *map(nth, range(each)), *map(nth, range(each))],
            out_specs=[whole, pl.BlockSpec((None, None, group, 1), lambda b, r, j, *_: (b, r, 0, 0))],
            scratch_shapes=[
                pltpu.VMEM((group, dim), jnp.float32),
                pltpu.VMEM((group, 1), jnp.float32),
                pltpu.VMEM((group, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, selecting, group, dim), q.dtype),
            jax.ShapeDtypeStruct((batch, selecting, group, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * live.shape[-1] * dim,
            bytes_accessed=2 * live.size * dim * k.dtype.itemsize,
            transcendentals=batch * heads * live.shape[-1],
        ),
        interpret=interpreter(interpret),
        name="gather_attention",
    )(
        index.reshape(-1),
        used.reshape(-1).astype(jnp.int32),
        q.reshape(batch, selecting, group, dim),
        live.astype(jnp.float32)[:, :, None],
        *[k] * each,
        *[v] * each,
    )
    return Attended(outs[0].reshape(q.shape), outs[1].reshape(batch, heads), None)


def _body(
    index_ref: Any,
    used_ref: Any,
    q_ref: Any,
    live_ref: Any,
    *refs: Any,
    scale: float,
    selecting: int,
    size: int,
    each: int,
    page: int,
    transposed: bool,
) -> None:
    k_refs, v_refs, (out_ref, lse_ref, acc_ref, top_ref, total_ref) = (
        refs[:each],
        refs[each : 2 * each],
        refs[2 * each :],
    )
    row, head, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def group(refs: Any) -> Array:
        return jnp.concatenate([ref[...] for ref in refs], axis=1 if transposed else 0)

    @pl.when(j == 0)
    def _start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(j * each < used_ref[row * selecting + head])
    def _fold() -> None:
        mark = live_ref[...]
        place = j * each * page + jax.lax.broadcasted_iota(jnp.int32, mark.shape, 1)
        mark = jnp.where(place < size, mark, 0.0)  # a block's contents after the last page are undefined
        live = mark > 0
        logits = jnp.where(live, dot(q_ref[...], group(k_refs), 0 if transposed else 1) * scale, MASKED)
        peak = jnp.maximum(top_ref[...], jnp.max(logits, axis=1, keepdims=True))
        shrink = jnp.exp(top_ref[...] - peak)
        share = jnp.where(live, jnp.exp(logits - peak), 0.0)
        values = group(v_refs)
        values = jnp.where(live if transposed else mark.reshape(-1, 1) > 0, values, jnp.zeros((), values.dtype))
        acc_ref[...] = acc_ref[...] * shrink + dot(share.astype(values.dtype), values, 1 if transposed else 0)
        top_ref[...] = peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(share, axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(2) - 1)
    def _finish() -> None:
        total = total_ref[...]
        out_ref[...] = (acc_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        lse_ref[...] = jnp.where(total > 0, top_ref[...] + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
