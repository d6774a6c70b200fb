"""From attention to attention in one kernel for Hopper GPUs, in Pallas' Mosaic dialect, with weights in bfloat16 or int8.

A program a multiprocessor stays for four products, each of which needs all of the one before, and owns the same share of each
one's outputs. One warpgroup does nothing but order weights, in the order that they will be wanted, as far ahead as there are slots;
two multiply them, by turns, add residuals and norm. Between products the programs meet: slots go on being filled meanwhile, so that
memory is not idle for as long as it takes to meet. (Of Llama-3.1-8B's shape on an H200 that takes 105 us per layer, four kernels
115, and reading the weights 98. From when the last program is done until all have their next inputs 2 to 4 us pass. Ordering weights into
the L2 cache meanwhile made it 111 to 115, and the next layer's first ones into it while attention runs 1 to 4 us more than nothing; writing
results without the copy engine, or having the counters in that cache, changed nothing. Nor did attention in here, too, with keys and values
through the same slots and the token written on the way, instead of three kernels before: an eighth of a step of 8 layers and the vocabulary
head took 152.7 us instead of 153.3 with 3712 slots for a row, 215 instead of 211 with 65856. The programs meet twice more for it, which with what
lies between is 4 us. Two such layers in one kernel took 134 us per layer instead of 128.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from ..device import hopper, target
from ..projection import Int8Matrix, Matrix, is_quantized
from .plan import HALF, PROGRAMS, ROWS, SCALES, Plan, columns, plan
from .types import BlockWeights

SWIZZLE = 128
"""Bytes of a row of shared memory that are interleaved."""

REGISTERS = {2: 216, 3: 152}
"""Registers of a thread that multiplies, by how many warpgroups do: with those of the one that orders weights, all that there are."""

COUNTERS = (509,)
"""Shape of the zeros that programs count meetings in, of which they need three: one that no other zeros have, or XLA would have one array
for both.
"""


def unsupported_reason(attended: Array, x: Array, weights: BlockWeights) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    if not hopper():
        return "this program is not for a Hopper GPU"
    cores = target().cores
    if cores is None or cores < PROGRAMS:  # programs that are not all there at once would wait for ever
        return f"this GPU has {cores} multiprocessors, not {PROGRAMS}"
    if attended.ndim != 2:
        return f"inputs are {attended.shape}, not a token per row"
    matrices = _matrices(weights)
    held = {"floats" if isinstance(w, jax.Array) else w.kind for w in matrices}
    if len(held) > 1:
        return f"some weights are {' and others '.join(sorted(held))}"
    if not held <= {"int8", "floats"}:
        return f"weights are {held.pop()}"
    floats = [w for w in matrices if isinstance(w, jax.Array)]
    kinds = {a.dtype for a in (attended, x, weights.mlp_norm.gain, weights.attn_norm.gain, *floats)}
    if kinds != {jnp.dtype(jnp.bfloat16)}:
        return f"not everything {'but weights ' if held == {'int8'} else ''}is bfloat16"
    found = _plan(attended, x, weights)
    return found if isinstance(found, str) else None


def _matrices(weights: BlockWeights) -> tuple[Matrix, ...]:
    return weights.o, weights.gate, weights.up, weights.down, weights.q, weights.k, weights.v


def _plan(attended: Array, x: Array, weights: BlockWeights) -> Plan | str:
    heads = weights.q.shape[0], weights.k.shape[0]
    rows, inputs = attended.shape
    size = 1 if is_quantized(weights.o) else 2
    return plan(rows, inputs, x.shape[1], weights.gate.shape[0], heads, size)


def fused_decode_block(
    attended: Array, x: Array, weights: BlockWeights, *, sizes: Plan | None = None
) -> tuple[Array, Array, Array, Array]:
    """The residual stream, the next layer's q, k and v; see the public function.

    Args:
        sizes: instead of those that `plan` finds.
    """
    found = _plan(attended, x, weights) if sizes is None else sizes
    assert isinstance(found, Plan)
    eps = weights.mlp_norm.eps, weights.attn_norm.eps
    matrices = _matrices(weights)
    gains = weights.mlp_norm.gain, weights.attn_norm.gain
    levels = tuple(w.levels if isinstance(w, Int8Matrix) else w for w in matrices)
    scales = tuple(w.scale.astype(jnp.float32) for w in matrices if isinstance(w, Int8Matrix))
    return _call(attended, x, gains, levels, scales, sizes=found, eps=eps)


@jax.jit(static_argnames=("sizes", "eps"))
def _call(
    attended: Array,
    x: Array,
    gains: tuple[Array, Array],
    matrices: tuple[Array, ...],
    scales: tuple[Array, ...],
    *,
    sizes: Plan,
    eps: tuple[float, float],
) -> tuple[Array, Array, Array, Array]:
    """The kernel, traced and lowered once for all layers.

    Args:
        matrices: of floats, or levels of int8.
        scales: of the outputs of each matrix of levels; none for floats.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from . import lanes

    batch, parts = sizes.rows, sizes.parts
    own, wide, (own_q, own_k) = sizes.outputs, sizes.wide, sizes.heads
    chunk, slots, held, groups = sizes.chunk, sizes.slots, sizes.inputs, sizes.warpgroups
    width, inner = matrices[0].shape[0], matrices[1].shape[0]
    counts = [size // parts // chunk for size in (attended.shape[1], width, inner)]
    of_attended, of_width, of_inner = counts
    blocks = {"o": own * parts // ROWS, "wide": wide * parts // HALF, "q": own_q * parts // ROWS}
    a_block, a_half = ROWS // parts, HALF // parts
    apart = own_k * parts == ROWS  # k and v have a block each, not a half
    pair = 2 if apart else 1
    quantized = bool(scales)
    # Who waits at a barrier must see all of its turns. So a slot has a barrier for each warpgroup, unless it is always the same one's.
    fixed = not quantized and slots % groups == 0
    wide_columns = columns(wide)
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    narrow_layout = plgpu.Layout.WG_STRIDED((8, 64), vec_size=4)
    wide_layout = plgpu.Layout.WG_STRIDED((8, wide_columns), vec_size=wide_columns // 16)

    def split(a: Array) -> Array:
        return a.reshape(a.shape[0] * parts, a.shape[1] // parts)

    def body(
        attended_ref: Any, x_ref: Any, mlp_gain_ref: Any, attn_gain_ref: Any, o_ref: Any, gate_ref: Any, up_ref: Any,
        down_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, scale_refs: tuple[Any, ...], counters_ref: Any,
        x_out: Any, q_out: Any, k_out: Any, v_out: Any, normed_ref: Any, gated_ref: Any, next_ref: Any,
        squares_ref: Any, next_squares_ref: Any,
        weights_smem: Any, inputs_smem: Any, sums_smem: Any, wide_smem: Any, x_smem: Any, gains_smem: Any,
        normed_smem: Any, out_smem: Any, squares_smem: Any, all_squares_smem: Any, roots_smem: Any,
        filled: Any, emptied: Any, arrived: Any, turned: Any, counted: Any, together: Any, scales_smem: Any = None,
    ) -> None:  # fmt: skip
        program, role = jax.lax.axis_index("program"), jax.lax.axis_index("role")

        @pl.when(role == groups)
        def _order() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def order(
                slot: int, count: int, chunks: int, halves: Sequence[tuple[Any, Any]], rows: int, step: int
            ) -> int:
                """Chunks of `count` blocks, each of two halves of `rows` rows, the first from a row of a matrix on."""
                whole = sizes.whole(count, chunks)

                def fill(i: Array, _: None) -> None:
                    block, part = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
                    at = jax.lax.rem(slot + i, slots)
                    turn = block if whole else slot + i
                    ready = filled.at[at if fixed else jax.lax.rem(turn, groups) * slots + at]

                    @pl.when(slot + i >= slots)
                    def _wait() -> None:
                        plgpu.barrier_wait(emptied.at[at])

                    for half, (ref, first) in enumerate(halves):
                        taken = ref.at[pl.ds(first + block * step, rows), pl.ds(part * chunk, chunk)]
                        plgpu.copy_gmem_to_smem(taken, weights_smem.at[at, pl.ds(half * HALF, rows)], ready)

                jax.lax.fori_loop(0, count * chunks, fill, None)
                return slot + count * chunks

            def both(ref: Any, first: Any) -> list[tuple[Any, Any]]:
                return [(ref, first), (ref, first + HALF)]

            at, at_wide, at_q, at_k = (program * count * parts for count in (own, wide, own_q, own_k))
            slot = order(0, blocks["o"], of_attended, both(o_ref, at), HALF, ROWS)
            slot = order(slot, blocks["wide"], of_width, [(gate_ref, at_wide), (up_ref, at_wide)], HALF, HALF)
            slot = order(slot, blocks["o"], of_inner, both(down_ref, at), HALF, ROWS)
            slot = order(slot, blocks["q"], of_width, both(q_ref, at_q), HALF, ROWS)
            if apart:
                slot = order(slot, 1, of_width, both(k_ref, at_k), HALF, 0)
                order(slot, 1, of_width, both(v_ref, at_k), HALF, 0)
            else:
                order(slot, 1, of_width, [(k_ref, at_k), (v_ref, at_k)], own_k * parts, 0)

        def fetch_one(ref: Any, part: Any, barriers: Any) -> None:
            at = jax.lax.rem(jnp.asarray(part, jnp.int32), held)
            plgpu.copy_gmem_to_smem(ref.at[:, pl.ds(part * chunk, chunk)], inputs_smem.at[at], barriers.at[at])

        def fetch(ref: Any, chunks: int, squares: Any = None) -> None:
            """Order inputs, as many as can be held, and every program's sums of their squares."""
            for part in range(min(chunks, held)):
                fetch_one(ref, part, turned if chunks > held else arrived)
            if squares is not None:
                plgpu.copy_gmem_to_smem(squares, all_squares_smem, counted)

        def multiply_chunk(total: Any, at: Any, inputs_at: Any) -> None:
            """Add the products of a slot's weights with a chunk of inputs to `total`, and hand the slot back."""
            if not quantized:
                plgpu.wgmma(total, weights_smem.at[at], inputs_smem.at[inputs_at].T)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(emptied.at[at])
                return
            # The matrix units do not multiply int8 by bfloat16, but they take what they multiply from registers, too. A slot is free once
            # its levels are there; they become bfloat16, which is exact, while those before are multiplied.
            slices = [pl.ds(first, SWIZZLE) for first in range(0, chunk, SWIZZLE)]
            levels = [lanes.load(weights_smem.at[at, :, taken], plgpu.Layout.WGMMA_UPCAST_2X) for taken in slices]
            plgpu.barrier_arrive(emptied.at[at])
            for taken, part in zip(slices, levels, strict=True):
                plgpu.wgmma(total, lanes.as_bfloat16(part), inputs_smem.at[inputs_at, :, taken].T)
            plgpu.wgmma_wait(0)

        def multiply(
            slot: int, count: int, chunks: int, ref: Any, out: Any, column: Callable[[Any], Any], second: int = 0,
            eps: float | None = None, again: bool = False, scales: Any = None,
        ) -> int:  # fmt: skip
            """Products of `count` blocks with the inputs in `ref`, into `out`; of the warpgroups each takes every so manieth chunk, or block.

            Args:
                eps: of the norm of these inputs, if they are normed.
                again: whether inputs and roots are there already.
                scales: of the outputs, by columns of `out`, if weights are levels.
            """
            turns = chunks > held
            whole = sizes.whole(count, chunks)
            roots = None if eps is None else roots_smem.at[role]

            def block(turn: Array, _: None) -> None:
                i = role + groups * turn if whole else turn
                start = slot + i * chunks
                # Slots go round among the warpgroups, or all of a block's are one's own.
                first = 0 if whole else jax.lax.rem(role + (groups - 1) * start if groups > 2 else role + start, groups)
                step = 1 if whole else groups
                fresh = (turn == 0) & (not (turns or again))  # inputs that nothing has waited for

                def add_up(total: Any) -> Array:
                    def add(j: Array, _: None) -> None:
                        part = first + step * j
                        at, inputs_at = jax.lax.rem(start + part, slots), jax.lax.rem(part, held)
                        if turns:
                            plgpu.barrier_wait(turned.at[inputs_at])
                        pl.when(fresh)(lambda: plgpu.barrier_wait(arrived.at[inputs_at]))
                        plgpu.barrier_wait(filled.at[at if fixed else role * slots + at])
                        multiply_chunk(total, at, inputs_at)
                        if turns:

                            @pl.when(part + held < chunks)
                            def _next() -> None:
                                fetch_one(ref, part + held, turned)

                    jax.lax.fori_loop(0, jax.lax.div(chunks - first + step - 1, step), add, None)
                    return total[...]

                products = pl.run_scoped(add_up, plgpu.WGMMAAccumulatorRef((ROWS, batch * parts), float32))

                if not whole:

                    @pl.when(fresh)
                    def _others() -> None:
                        """Of every barrier each turn is waited for, or the next one would be taken for it."""
                        for other in range(1, groups):
                            begin: Any = 1 - first if groups == 2 else jax.lax.rem(first + other, groups)

                            def wait(j: Array, _: None, begin: Any = begin) -> None:
                                plgpu.barrier_wait(arrived.at[begin + groups * j])

                            jax.lax.fori_loop(0, jax.lax.div(chunks - begin + groups - 1, groups), wait, None)

                if (added := eps) is not None and not again:

                    @pl.when(turn == 0)
                    def _roots() -> None:
                        plgpu.barrier_wait(counted)
                        lanes.inverse_roots(all_squares_smem, roots, depth=width, eps=added)

                lanes.add_diagonals(products, out, column(i), parts=parts, second=second, scale=roots, scales=scales)

            own_blocks = jax.lax.div(count - role + groups - 1, groups) if whole else count
            jax.lax.fori_loop(0, own_blocks, block, None)
            return slot + count * chunks

        def put(smem: Any, count: int, ref: Any) -> None:
            """A program's `count` columns of every row, into inputs of the next product."""
            size = ref.shape[1]
            part, column = jax.lax.div(program * count, size), jax.lax.rem(program * count, size)
            for row in range(batch):
                plgpu.copy_smem_to_gmem(smem.at[row, pl.ds(0, count)], ref.at[row * parts + part, pl.ds(column, count)])

        def added_up(parts: Sequence[Any], layout: Any) -> Array:
            """What the warpgroups have each made of their chunks, as the product's type has it."""
            first, *others = (lanes.load(part, layout) for part in parts)
            for other in others:
                first += other
            return first.astype(bfloat16)

        def places(sums: Any, count: int, chunks: int) -> list[Any]:
            """Where warpgroups gather a product: one array for all if each has whole blocks, one each if they have parts of all sums."""
            return [sums.at[i] for i in range(1 if sizes.whole(count, chunks) else groups)]

        def join(gain: int, chunks: int, ref: Any, squares: Any, last: bool = False) -> None:
            """Add the product to the residual stream, and hand on what the next product takes."""
            product = added_up(places(sums_smem, blocks["o"], chunks), narrow_layout)
            x = product.astype(float32) + lanes.load(x_smem, narrow_layout).astype(float32)
            x = x.astype(bfloat16)
            x_smem[...], exact = x, x.astype(float32)
            gains = lanes.load(gains_smem.at[gain], narrow_layout).astype(float32)
            normed_smem[...] = (exact * gains).astype(bfloat16)
            lanes.sum_rows(exact * exact, squares_smem)
            plgpu.commit_smem()
            put(normed_smem, own, ref)
            plgpu.copy_smem_to_gmem(squares_smem, squares.at[program])
            for row in range(batch if last else 0):
                plgpu.copy_smem_to_gmem(x_smem.at[row, pl.ds(0, own)], x_out.at[row, pl.ds(program * own, own)])
            plgpu.wait_smem_to_gmem(0)

        def gathered(half: int, count: int) -> Array:
            return added_up(places(wide_smem.at[:, half], count, of_width), wide_layout)

        @pl.when(role < groups)
        def _compute() -> None:
            plgpu.set_max_registers(REGISTERS[groups], action="increase")
            rows = pl.ds(0, 2), 2, 3, 4, 5
            of_wide, of_o, of_down, of_q, of_kv = (scales_smem.at[row] if quantized else None for row in rows)

            def into(sums: Any, count: int, chunks: int) -> Any:
                return sums.at[0 if sizes.whole(count, chunks) else role]

            def everyone() -> None:
                plgpu.barrier_arrive(together)
                plgpu.barrier_wait(together)

            def lead(work: Callable[[], None]) -> None:
                everyone()
                pl.when(role == 0)(work)

            def begin() -> None:
                fetch(attended_ref, of_attended)
                for i in range(groups):
                    sums_smem[i] = jnp.zeros((8, 64), float32)
                x_smem[...] = jnp.zeros((8, 64), bfloat16)
                lanes.sync()
                lanes.bring(x_ref, x_smem, program * own, count=own)
                lanes.bring(mlp_gain_ref, gains_smem.at[0], program * own, count=own)
                lanes.bring(attn_gain_ref, gains_smem.at[1], program * own, count=own)
                counts = own, wide, wide, own, own_q, own_k, own_k
                places = (2, 0), (0, 0), (1, 0), (3, 0), (4, 0), (5, 0), (5, 64)
                for ref, count, (row, column) in zip(scale_refs, counts, places, strict=True) if quantized else ():
                    lanes.bring_scales(ref, scales_smem.at[row, pl.ds(column, count)], program * count, count=count)
                lanes.sync()

            def gate() -> None:
                join(0, of_attended, normed_ref, squares_ref)
                lanes.meet(counters_ref, 0, 2, program)
                fetch(normed_ref, of_width, squares_ref)

            def down() -> None:
                gate, up = (gathered(half, blocks["wide"]).astype(float32) for half in range(2))
                out_smem[0] = (gate * up / (1 + jnp.exp(-gate))).astype(bfloat16)
                plgpu.commit_smem()
                put(out_smem.at[0], wide, gated_ref)
                plgpu.wait_smem_to_gmem(0)
                lanes.meet(counters_ref, 1, 0, program)
                fetch(gated_ref, of_inner)

            def heads() -> None:
                join(1, of_inner, next_ref, next_squares_ref, last=True)
                lanes.meet(counters_ref, 2, 1, program)
                fetch(next_ref, of_width, next_squares_ref)

            def end() -> None:
                for half, count in enumerate((blocks["q"], pair)):
                    out_smem[half] = gathered(half, count)
                plgpu.commit_smem()
                for row in range(batch):
                    for ref, half, first, count in (
                        (q_out, 0, 0, own_q),
                        (k_out, 1, 0, own_k),
                        (v_out, 1, 64, own_k),
                    ):
                        taken = out_smem.at[half, row, pl.ds(first, count)]
                        plgpu.copy_smem_to_gmem(taken, ref.at[row, pl.ds(program * count, count)])
                plgpu.wait_smem_to_gmem(0)

            lead(begin)
            everyone()
            sums = into(sums_smem, blocks["o"], of_attended)
            slot = multiply(0, blocks["o"], of_attended, attended_ref, sums, lambda i: i * a_block, a_half, scales=of_o)
            lead(gate)
            gated = into(wide_smem, blocks["wide"], of_width)
            slot = multiply(
                slot, blocks["wide"], of_width, normed_ref, gated, lambda i: i * a_half, eps=eps[0], scales=of_wide
            )
            lead(down)
            sums = into(sums_smem, blocks["o"], of_inner)
            slot = multiply(slot, blocks["o"], of_inner, gated_ref, sums, lambda i: i * a_block, a_half, scales=of_down)
            lead(heads)
            queries, pairs = into(wide_smem, blocks["q"], of_width).at[0], into(wide_smem, pair, of_width).at[1]
            slot = multiply(
                slot, blocks["q"], of_width, next_ref, queries, lambda i: i * a_block, a_half, eps=eps[1], scales=of_q
            )
            beside = a_half if apart else 64
            multiply(
                slot, pair, of_width, next_ref, pairs, lambda i: i * 64, beside, eps=eps[1], again=True, scales=of_kv
            )
            lead(end)

    def tiled(size: int) -> tuple[Any, ...]:
        """How numbers of so many bytes lie in shared memory."""
        return plgpu.TilingTransform((8, SWIZZLE // size)), plgpu.SwizzleTransform(SWIZZLE)

    shape, smem, barrier = jax.ShapeDtypeStruct, plgpu.SMEM, plgpu.Barrier
    # XLA is not told that these are written. It need not know: calls follow one another, as each takes what the one before made, and a call
    # does as well with zeros as with what another has left, in which only the last meeting's counter is not zero; the first clears it.
    counters = jnp.zeros(COUNTERS, jnp.int32)
    out = plgpu.kernel(
        body,
        out_type=[
            shape(x.shape, bfloat16),
            *(shape((batch, w.shape[0]), bfloat16) for w in matrices[4:]),
            *(shape((batch * parts, size // parts), bfloat16) for size in (width, inner, width)),
            *(shape((PROGRAMS, 8), float32) for _ in range(2)),
        ],
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="role",
        scratch_types=[
            smem((slots, ROWS, chunk), matrices[0].dtype, transforms=tiled(sizes.bytes)),
            smem((held, batch * parts, chunk), bfloat16, transforms=tiled(2)),
            smem((groups, 8, 64), float32),
            smem((groups, 2, 8, wide_columns), float32),
            smem((8, 64), bfloat16),
            smem((2, 8, 64), bfloat16),
            smem((8, 64), bfloat16),
            smem((2, 8, wide_columns), bfloat16),
            smem((8,), float32),
            smem((PROGRAMS, 8), float32),
            smem((groups, 8), float32),
            barrier(num_arrivals=2, num_barriers=slots if fixed else groups * slots),
            barrier(num_barriers=slots),
            barrier(num_barriers=held),
            barrier(num_barriers=held),
            barrier(),
            barrier(num_arrivals=groups),
            *([smem((SCALES, wide_columns), float32)] if quantized else []),
        ],
        kernel_name="fused_decode_block",
    )(split(attended), x, *gains, *map(split, matrices), scales, counters)
    return out[0], out[1], out[2], out[3]
