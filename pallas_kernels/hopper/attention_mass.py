"""Mosaic GPU kernels of `attention_mass` for Hopper GPUs: attention that each token receives from all queries.

`Op` in `window_scores/api.py` calls them for the cases that `unsupported_reason` permits. Results must match the sum of
window scores that it computes otherwise, up to rounding.

The first kernel computes the softmax normalisers, the second the sums.

A warpgroup keeps one tile in shared memory: queries in the first kernel, keys in the second. It streams tiles of the
other operand through TMA copies, multiplies them by `wgmma` and accumulates in registers. Two such programs share a
multiprocessor, so that one computes exponentials while the other multiplies. No array of size queries x tokens exists.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..masking import MASKED
from .wgmma import LOG2_E, along_rows, sync_warps, tiled, wgmma_unsupported

TILE = 128
"""Queries per tile, and tokens per tile."""

STAGES = 2
"""Tiles in flight."""

NOTHING = 1e30
"""Normaliser of padding queries, whose probabilities are then zero."""


def unsupported_reason(
    q: Array,
    k: Array,
    first: Array,
    count: Array,
    *,
    scale: float,
    sliding_window: int | None,
    sinks: Array | None = None,
) -> str | None:
    """Return why these kernels do not support a case, or None if they do."""
    if sinks is not None:
        return "there are attention sinks"
    if reason := wgmma_unsupported(q, k):
        return reason
    return None if sliding_window is None else "there is a sliding window"


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window"))
def attention_mass(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    first: Int[Array, "B K"],
    count: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: None,
    sinks: None = None,
) -> Float[Array, "B K T"]:
    """Compute sums of attention; see the public function. It is traced and lowered once for all layers.

    Args:
        q, k, scale: as for the public function.
        first: first slot with a token in each head.
        count: number of queries per sequence.
        sliding_window, sinks: always None.
    """
    size, length, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    before = length - size
    place = jnp.arange(length, dtype=jnp.int32)
    there = place[:size] < count[:, None]
    q = jnp.where(there[..., None, None], q, jnp.zeros((), q.dtype))  # 0 x NaN would reach the sums
    q, k = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0))) for x in (q, k))
    normalisers = _normalisers(q, k, first, before=before, scale=scale * LOG2_E)
    there = jnp.arange(q.shape[1], dtype=jnp.int32) < count[:, None, None]
    normalisers = jnp.where(there, normalisers, NOTHING)
    mass = _sums(q, k, normalisers, count, before=before, scale=scale * LOG2_E)[:, :, :length]
    held = (place >= first[..., None]) & (place < before + count[:, None, None])
    return jnp.where(held, mass, 0.0) / group


def _normalisers(
    q: Float[Array, "B S N H"], k: Float[Array, "B T K H"], first: Int[Array, "B K"], *, before: int, scale: float
) -> Float[Array, "B N S"]:
    """Return the base-2 log-sum-exp of each query's logits."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, size, heads, dim = q.shape
    kv_heads, tiles = k.shape[2], k.shape[1] // TILE

    def body(q_ref: Any, k_ref: Any, first_ref: Any, out_ref: Any, *scratch: Any) -> None:
        q_smem, k_smem, out_smem, ready, filled, read = scratch
        row, head, block = (jax.lax.axis_index(name) for name in ("row", "head", "block"))
        kv_head = jax.lax.div(head, jnp.asarray(heads // kv_heads, head.dtype))
        base, least = block * TILE, first_ref[row * kv_heads + kv_head]
        begin = jax.lax.div(least, jnp.asarray(TILE, jnp.int32))
        end = jnp.minimum(pl.cdiv(before + base + TILE, jnp.asarray(TILE, jnp.int32)), tiles)

        def fetch(tile: Any, stage: Any) -> None:
            span = pl.ds(tile * TILE, TILE)
            plgpu.copy_gmem_to_smem(k_ref.at[row, span, kv_head], k_smem.at[stage], filled.at[stage])

        plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(base, TILE), head], q_smem, ready)
        for stage in range(STAGES):
            pl.when(begin + stage < end)(functools.partial(fetch, begin + stage, stage))
        plgpu.barrier_wait(ready)
        query, slot = (
            plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )

        def fold(tile: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            top, total = sums
            stage = jax.lax.rem(tile - begin, jnp.asarray(STAGES, jnp.int32))
            plgpu.barrier_wait(filled.at[stage])
            logits = _product(plgpu, q_smem, k_smem.at[stage]) * scale
            sync_warps(plgpu, read)
            pl.when(tile + STAGES < end)(functools.partial(fetch, tile + STAGES, stage))
            place = slot + tile * TILE
            logits = jnp.where((place >= least) & (place <= query + (before + base)), logits, MASKED)
            higher = jnp.maximum(top, jnp.max(logits, axis=1))
            share = jnp.exp2(logits - jax.lax.broadcast_in_dim(higher, logits.shape, [0]))
            return higher, total * jnp.exp2(top - higher) + jnp.sum(share, axis=1)

        start = along_rows(plgpu, TILE, MASKED), along_rows(plgpu, TILE, 0.0)
        top, total = jax.lax.fori_loop(begin, end, fold, start)
        out_smem[...] = top + jnp.log(total) * LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, pl.ds(base, TILE)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, heads, size), jnp.float32),
        grid=(heads, size // TILE, batch),
        grid_names=("head", "block", "row"),
        scratch_types=_scratch(plgpu, q.dtype, dim, lines=0),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, first.reshape(-1))


def _sums(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    normalisers: Float[Array, "B N S"],
    count: Int[Array, " B"],
    *,
    before: int,
    scale: float,
) -> Float[Array, "B K T"]:
    """Return the attention that each token receives from all queries of a group."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, size, heads, dim = q.shape
    length, kv_heads = k.shape[1:3]
    group, most = heads // kv_heads, size // TILE

    def body(q_ref: Any, k_ref: Any, normalisers_ref: Any, count_ref: Any, out_ref: Any, *scratch: Any) -> None:
        k_smem, q_smem, out_smem, ready, filled, read, lines_smem = scratch
        row, kv_head, block = (jax.lax.axis_index(name) for name in ("row", "head", "block"))
        base = block * TILE
        begin = jax.lax.div(jnp.maximum(base - before, 0), jnp.asarray(TILE, jnp.int32))
        end = jnp.minimum(pl.cdiv(count_ref[row], jnp.asarray(TILE, jnp.int32)), most)
        tiles = jnp.maximum(end - begin, 0)
        steps = tiles * group

        def at(step: Any) -> tuple[Any, Any]:
            """Return the query head and first query of a step."""
            member = jax.lax.div(step, jnp.maximum(tiles, 1))
            return kv_head * group + member, (begin + step - member * tiles) * TILE

        def fetch(step: Any, stage: Any) -> None:
            head, query = at(step)
            span = pl.ds(query, TILE)
            plgpu.copy_gmem_to_smem(q_ref.at[row, span, head], q_smem.at[stage], filled.at[stage])
            plgpu.copy_gmem_to_smem(normalisers_ref.at[row, head, span], lines_smem.at[stage], filled.at[stage])

        plgpu.copy_gmem_to_smem(k_ref.at[row, pl.ds(base, TILE), kv_head], k_smem, ready)
        for stage in range(STAGES):
            pl.when(stage < steps)(functools.partial(fetch, stage, stage))
        plgpu.barrier_wait(ready)
        slot, query = (
            plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )

        def add(step: Any, total: Array) -> Array:
            stage = jax.lax.rem(step, jnp.asarray(STAGES, jnp.int32))
            plgpu.barrier_wait(filled.at[stage])
            logits = _product(plgpu, k_smem, q_smem.at[stage]) * scale
            line = plgpu.layout_cast(lines_smem[stage], plgpu.Layout.WGMMA.reduce(0))
            logits -= jax.lax.broadcast_in_dim(line, logits.shape, [1])
            sync_warps(plgpu, read)
            pl.when(step + STAGES < steps)(functools.partial(fetch, step + STAGES, stage))
            seen = slot + base <= query + (at(step)[1] + before)
            return total + jnp.sum(jnp.where(seen, jnp.exp2(logits), 0.0), axis=1)

        out_smem[...] = jax.lax.fori_loop(0, steps, add, along_rows(plgpu, TILE, 0.0))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, kv_head, pl.ds(base, TILE)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, length), jnp.float32),
        grid=(kv_heads, length // TILE, batch),
        grid_names=("head", "block", "row"),
        scratch_types=_scratch(plgpu, q.dtype, dim, lines=1),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, normalisers, count)


def _product(plgpu: Any, a_smem: Any, b_smem: Any) -> Array:
    """Multiply the rows of two tiles, in float32."""

    def multiply(products_ref: Any) -> Array:
        plgpu.wgmma(products_ref, a_smem, b_smem.T)
        return products_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))


def _scratch(plgpu: Any, dtype: Any, dim: int, lines: int) -> list[Any]:
    """Return the scratch types: the resident tile, the streamed tiles, the result, and barriers.

    With `lines`, there is also one normaliser per streamed query.
    """
    return [
        plgpu.SMEM((TILE, dim), dtype, transforms=tiled(plgpu)),
        plgpu.SMEM((STAGES, TILE, dim), dtype, transforms=tiled(plgpu)),
        plgpu.SMEM((TILE,), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=1 + lines, num_barriers=STAGES),
        plgpu.Barrier(),
        *[plgpu.SMEM((STAGES, TILE), jnp.float32) for _ in range(lines)],
    ]
