"""Mosaic GPU kernel of `block_attention` for Hopper GPUs: attention of a block of tokens over slots.

`Op` in `prefill_attention/api.py` calls it for the cases that `unsupported_reason` permits. Results must match
`prefill_attention/reference.py` up to rounding. `partial_block_attention` is the same kernel.

It is the pipeline of FlashAttention-3 (Shah et al. 2024), as in JAX's own example. One warpgroup issues TMA copies of
tiles of keys and values. Two warpgroups each multiply a tile of queries, in a ping-pong schedule: the softmax of one
overlaps the matmuls of the other. Here, tiles begin at a head's first slot and end at the queries' own slots. Each slot
has a bias, which is the logarithm of its weight, or the mask value if it is free.

cuDNN's attention would need two calls, over the kept slots and over the block. Combining them requires the log-sum-exp,
which JAX's public function only returns in 16 bits.
"""

import functools
from collections.abc import Mapping
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..masking import MASKED
from ..prefill_attention.types import Run, Stripes
from ..tuning import tuned
from .wgmma import LOG2_E, along_rows, tiled, wgmma_unsupported

DIMS = 64, 128, 256
"""Head dims."""

SIZES = {"rows": 64, "slots": 128, "stages": 2}
"""Default sizes, used where none were measured: queries per warpgroup, slots per tile, and tiles in flight."""

WIDE_SIZES = {**SIZES, "slots": 64}
"""The same for the largest head dim. Larger tiles do not fit into shared memory."""

WARPGROUPS = 2
"""Consumer warpgroups."""


def unsupported_reason(
    q: Array, k: Array, v: Array, q_pos: Array, pos: Array, weight: Array | None = None, **options: Any
) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if reason := wgmma_unsupported(q, k, DIMS):
        return reason
    if options.get("run") is None:
        return "slots are not in order of position"
    return "there is a sliding window" if options.get("window") is not None else None


def block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    run: Run,
    scale: float,
    window: None = None,
    sizes: Mapping[str, int] | None = None,
) -> Float[Array, "B S N H"]:
    """Softmax attention of a block of tokens over slots; see the public function.

    Args:
        sizes: `rows` (queries per warpgroup), `slots` per tile and `stages` (tiles in flight), instead of the tuned
            sizes.
    """
    out, *_ = _over_slots(q, k, v, pos, weight, run, None, scale=scale, sizes=sizes, sums=False)
    return jnp.where((q_pos >= 0)[..., None, None], out, jnp.zeros((), q.dtype))


def partial_block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    run: Run,
    scale: float,
    window: None = None,
    stripes: Stripes | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N"]]:
    """Also return the log-sum-exp; see the public function."""
    out, sums = _over_slots(q, k, v, pos, weight, run, stripes, scale=scale, sizes=sizes, sums=True)
    sums = jnp.moveaxis(sums, 1, 2)
    seen = (q_pos >= 0)[..., None] & (sums > MASKED / 2)  # the kernel computes in powers of two
    return jnp.where(seen[..., None], out, jnp.zeros((), q.dtype)), jnp.where(seen, sums, -jnp.inf)


def _over_slots(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None,
    run: Run,
    stripes: Stripes | None,
    *,
    scale: float,
    sizes: Mapping[str, int] | None,
    sums: bool,
) -> list[Array]:
    """Return the attended values and, if requested, the log-sum-exp [B, N, S]."""
    (_, size, heads, dim), (_, kv_heads, slots, _) = q.shape, k.shape
    case = {"queries": size, "slots": slots, "group": heads // kv_heads, "head_dim": dim}
    sizes = sizes or tuned("block_attention", case, WIDE_SIZES if dim == DIMS[-1] else SIZES)
    width = sizes["slots"]
    live = pos >= 0
    bias = jnp.where(live, 0.0 if weight is None else jnp.log2(jnp.maximum(weight, 1.0)), MASKED)
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -slots % width)), constant_values=MASKED)
    bias = einops.rearrange(bias, "b k (t s) -> (b k) t s", s=width)
    # NaN in a free slot would reach the sums as 0 x NaN. TMA copies need a multiple of 8 rows, and at least a whole
    # tile.
    k, v = (jnp.where(live[..., None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, max(-slots % 8, width - slots)), (0, 0))) for x in (k, v))
    queries = jnp.pad(q, ((0, 0), (0, -size % (WARPGROUPS * sizes["rows"])), (0, 0), (0, 0)))
    part, striping = (), None
    if stripes is not None:
        part, striping = (stripes.part[None],), (stripes.width, stripes.parts)
    given = queries, k, v, bias, run.first, run.own, *part
    out, *others = _attend(*given, scale=scale, sizes=tuple(sizes.items()), striping=striping, sums=sums)
    return [out[:, :size], *(x[:, :, :size] for x in others)]


@functools.partial(jax.jit, static_argnames=("scale", "sizes", "striping", "sums"))
def _attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    bias: Float[Array, "F U W"],
    first: Int[Array, "B K"],
    own: Int[Array, "B K"],
    *part: Int[Array, "1"],
    scale: float,
    sizes: tuple[tuple[str, int], ...],
    striping: tuple[int, int] | None,
    sums: bool,
) -> list[Array]:
    """Call the kernel for whole tiles of queries. It is traced and lowered once for all layers.

    Args:
        q, k, v: padded queries, keys and values.
        bias: logarithm (base 2) of each slot's weight, `MASKED` if it is free, in tiles.
        first, own: as in `Run`.
        part: as in `Stripes`, if the slots are a part of the cache.
        scale: factor on the logits.
        sizes: block sizes.
        striping: `width` and `parts` as in `Stripes`, or None.
        sums: whether to return the log-sum-exp.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, size, heads, dim = q.shape
    kv_heads, tiles, width = k.shape[1], *bias.shape[1:]
    group, rows, stages = heads // kv_heads, dict(sizes)["rows"], dict(sizes)["stages"]
    both = WARPGROUPS * rows

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        bias_ref: Any,
        first_ref: Any,
        own_ref: Any,
        *refs: Any,
    ) -> None:
        part_refs, refs = refs[: len(part)], refs[len(part) :]
        (out_ref, *sums_refs), scratch = refs[: len(results)], refs[len(results) :]
        q_smem, k_smem, v_smem, bias_smem, q_ready, k_ready, v_ready, k_read, v_read, order_barrier, *sums_smems = (
            scratch
        )
        stripes = [Stripes(*striping, part_ref[0]) for part_ref in part_refs] if striping else []
        row, head, block = (jax.lax.axis_index(name) for name in ("row", "head", "block"))
        warpgroup = jax.lax.axis_index("warpgroup")
        kv_head = jax.lax.div(head, jnp.asarray(group, head.dtype))
        fold = row * kv_heads + kv_head
        before = own_ref[fold]

        def below(slot: Any) -> Any:
            """Return how many slots of this part precede a slot of the whole cache."""
            for each in stripes:
                slot = each.below(slot)
            return slot

        begin = jnp.minimum(jax.lax.div(below(first_ref[fold]), jnp.asarray(width, jnp.int32)), tiles - 1)

        def end(queries: Any) -> Any:
            """Return the end of the tiles that the first `queries` queries see. A part has at least one tile, for
            queries that see nothing.
            """
            last = jnp.minimum(pl.cdiv(below(before + queries), jnp.asarray(width, jnp.int32)), tiles)
            return jnp.maximum(last, begin + 1) if stripes else last

        last = end((block + 1) * both)

        def fetch_keys(tile: Any, stage: Any) -> None:
            span = pl.ds(tile * width, width)
            plgpu.copy_gmem_to_smem(k_ref.at[row, kv_head, span], k_smem.at[stage], k_ready.at[stage])
            plgpu.copy_gmem_to_smem(bias_ref.at[fold, tile], bias_smem.at[stage], k_ready.at[stage])

        def fetch_values(tile: Any, stage: Any) -> None:
            span = pl.ds(tile * width, width)
            plgpu.copy_gmem_to_smem(v_ref.at[row, kv_head, span], v_smem.at[stage], v_ready.at[stage])

        def stage_of(tile: Any) -> Any:
            return jax.lax.rem(tile - begin, jnp.asarray(stages, jnp.int32))

        def ping_pong() -> None:
            plgpu.barrier_arrive(order_barrier)
            plgpu.barrier_wait(order_barrier)

        @pl.when(warpgroup == WARPGROUPS)
        def _produce() -> None:
            plgpu.set_max_registers(40, action="decrease")
            for stage in range(stages):

                @pl.when(begin + stage < last)
                def _start(stage: int = stage) -> None:
                    fetch_keys(begin + stage, stage)
                    fetch_values(begin + stage, stage)

            @pl.loop(begin + stages, jnp.maximum(last, begin + stages))
            def _follow(tile: Any) -> None:
                stage = stage_of(tile)
                plgpu.barrier_wait(k_read.at[stage])
                fetch_keys(tile, stage)
                plgpu.barrier_wait(v_read.at[stage])
                fetch_values(tile, stage)

        @pl.when(warpgroup < WARPGROUPS)
        def _consume() -> None:
            plgpu.set_max_registers(232, action="increase")
            mine = q_smem.at[warpgroup]
            base = block * both + warpgroup * rows
            span = out_ref.at[row, pl.ds(base, rows), head]
            plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(base, rows), head], mine, q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])
            stop = end(base + rows)
            whole = jax.lax.div(below(before + base + 1), jnp.asarray(width, jnp.int32))
            whole = jnp.minimum(jnp.maximum(whole, begin), stop)  # tiles that all of its queries see completely
            plgpu.barrier_wait(k_ready.at[0])
            pl.when(warpgroup == 1)(ping_pong)

            def fold_in(tile: Any, found: Any, *, masked: bool) -> Any:
                acc, top, total = found
                stage = stage_of(tile)

                def multiply(logits_ref: Any) -> Array:
                    plgpu.wgmma(logits_ref, mine, k_smem.at[stage].T)
                    ping_pong()
                    return logits_ref[...]

                logits = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, width), jnp.float32))
                added = plgpu.layout_cast(bias_smem[stage], plgpu.Layout.WGMMA.reduce(0))
                added = jax.lax.broadcast_in_dim(added, (rows, width), [1])
                plgpu.barrier_arrive(k_read.at[stage])
                logits = logits * (scale * LOG2_E) + added
                if masked:
                    query, slot = (
                        plgpu.broadcasted_iota(jnp.int32, (rows, width), axis, layout=plgpu.Layout.WGMMA)
                        for axis in (0, 1)
                    )
                    slot += tile * width
                    for each in stripes:
                        slot = each.among_all(slot)
                    logits = jnp.where(slot <= query + (before + base), logits, MASKED)
                higher = jnp.maximum(top, jnp.max(logits, axis=1))
                shrink = jnp.exp2(top - higher)
                share = jnp.exp2(logits - jax.lax.broadcast_in_dim(higher, logits.shape, [0]))
                acc *= jax.lax.broadcast_in_dim(shrink, acc.shape, [0])
                total = total * shrink + jnp.sum(share, axis=1)
                rounded = share.astype(v.dtype)
                acc, total, higher, rounded = jax.lax.optimization_barrier((acc, total, higher, rounded))
                plgpu.barrier_arrive(order_barrier)
                plgpu.barrier_wait(v_ready.at[stage])
                plgpu.barrier_wait(order_barrier)

                def add(acc_ref: Any) -> None:
                    plgpu.wgmma(acc_ref, rounded, v_smem.at[stage])

                    @pl.when(tile + 1 < stop)
                    def _ready() -> None:
                        plgpu.barrier_wait(k_ready.at[stage_of(tile + 1)])

                acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
                plgpu.barrier_arrive(v_read.at[stage])
                return acc, higher, total

            def skip(tile: Any, _: None) -> None:
                """Skip a tile that only the other warpgroup's queries see."""
                # The barriers are the same as in `fold_in`. If this warpgroup were a tile ahead, it could arrive at a
                # barrier twice in one phase.
                stage = stage_of(tile)
                ping_pong()
                plgpu.barrier_arrive(k_read.at[stage])
                ping_pong()
                plgpu.barrier_arrive(v_read.at[stage])

            acc = plgpu.layout_cast(jnp.zeros((rows, dim), jnp.float32), plgpu.Layout.WGMMA)
            found = acc, along_rows(plgpu, rows, MASKED), along_rows(plgpu, rows, 0.0)
            found = jax.lax.fori_loop(begin, whole, functools.partial(fold_in, masked=False), found)
            acc, top, total = jax.lax.fori_loop(whole, stop, functools.partial(fold_in, masked=True), found)
            jax.lax.fori_loop(stop, last, skip, None)
            pl.when(warpgroup == 0)(ping_pong)
            acc /= jax.lax.broadcast_in_dim(total, acc.shape, [0])
            mine[...] = acc.astype(q.dtype)
            lines = [each.at[warpgroup] for each in sums_smems]
            for line in lines:
                line[...] = top * (1 / LOG2_E) + jnp.log(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, span)
            for line, sums_ref in zip(lines, sums_refs, strict=True):
                plgpu.copy_smem_to_gmem(line, sums_ref.at[row, head, pl.ds(base, rows)])
            plgpu.wait_smem_to_gmem(0)

    results, room = [jax.ShapeDtypeStruct(q.shape, q.dtype)], []
    if sums:
        results.append(jax.ShapeDtypeStruct((batch, heads, size), jnp.float32))
        room.append(plgpu.SMEM((WARPGROUPS, rows), jnp.float32))
    return plgpu.kernel(
        body,
        out_type=results,
        grid=(heads, size // both, batch),
        grid_names=("head", "block", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, rows, dim), q.dtype, transforms=tiled(plgpu)),
            plgpu.SMEM((stages, width, dim), k.dtype, transforms=tiled(plgpu)),
            plgpu.SMEM((stages, width, dim), v.dtype, transforms=tiled(plgpu)),
            plgpu.SMEM((stages, width), jnp.float32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *room,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, bias, first.reshape(-1), own.reshape(-1), *part)
