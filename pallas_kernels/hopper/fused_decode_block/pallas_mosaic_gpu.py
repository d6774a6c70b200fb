"""Mosaic GPU kernel of `fused_decode_block` for Hopper GPUs, with bfloat16, int8 or 4-bit weights.

`Op` in `api.py` calls it for the cases that `unsupported_reason` permits. Results must match `reference.py` up to
rounding. `plan.py` defines the words part, block, chunk and slot.

The kernel is persistent: one program per multiprocessor computes its share of the outputs of four matmuls. Each matmul
needs all results of the previous one. In each program:

- One warp, the producer, issues the TMA copies of all weights, in order of use, into a ring of slots in shared memory.
- Two or three consumer warpgroups multiply the slots' weights in alternation, and add residuals and norms.

A grid barrier separates the matmuls. Copies of weights continue during the barrier, so that memory does not idle for
its whole latency. Threads read and write small data themselves, except inputs that do not fit at once: the TMA would
process them after all weights that were issued before.

With Llama-3.1-8B's shape on an H200, the kernel is bandwidth bound while there are free slots. Memory idles from a
layer's last matmul, whose weights are already copied, to the next layer's first one, and at the end of each grid
barrier. These changes did not help there, or made it slower:

- Prefetch weights into the L2 cache during a barrier, or the next layer's first weights during attention.
- Start before the previous kernel ends (programmatic dependent launch).
- Replace the barrier's fence by a tag in every number that shows that it is valid.
- Multiply 4-bit weights by `mma.sync` too.
- Process the codes of two slots at a time.
- Include attention, with keys and values through the same slots and the new token written on the way.
- Compute two layers in one kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from ...device import hopper, target
from ...projection import GroupedMatrix, Int8Matrix, Matrix
from .plan import BYTES, GROUPS, HALF, LINE, PROGRAMS, ROWS, SCALES, Plan, columns, plan
from .types import BlockWeights

SWIZZLE = 128
"""Swizzle of shared memory, in bytes."""

REGISTERS = {2: 216, 3: 152}
"""Registers per consumer thread, by number of consumer warpgroups. With the producer's they fill the register file."""

BITS = {"floats": 16, "int8": 8, "int4": 4}
"""Bits per weight, by kind of weight."""

AT_ONCE = 16
"""16-byte pieces of inputs that a thread loads before it waits."""

COUNTERS = (509,)
"""Shape of the grid barriers' counters. Three are needed.

The shape is unusual on purpose: XLA would merge the zeros with another zero array of the same shape.
"""


def unsupported_reason(attended: Array, x: Array, weights: BlockWeights) -> str | None:
    """Return why this kernel does not support a case, or None if it does."""
    if not hopper():
        return "this program is not for a Hopper GPU"
    cores = target().cores
    if cores is None or cores < PROGRAMS:  # programs that do not all run at once would deadlock
        return f"this GPU has {cores} multiprocessors, not {PROGRAMS}"
    if attended.ndim != 2:
        return f"inputs have shape {attended.shape}, not one token per row"
    matrices = _matrices(weights)
    formats = {"floats" if isinstance(w, jax.Array) else w.kind for w in matrices}
    if len(formats) > 1:
        return f"some weights are {' and others '.join(sorted(formats))}"
    if not formats <= set(BITS):
        return f"weights are {formats.pop()}"
    if (grouped := [w for w in matrices if isinstance(w, GroupedMatrix)]) and (reason := _other_form(grouped)):
        return reason
    if any(norm.offset is not None for norm in (weights.mlp_norm, weights.attn_norm)):
        return "gains of norms have an offset"
    floats = [w for w in matrices if isinstance(w, jax.Array)]
    kinds = {a.dtype for a in (attended, x, weights.mlp_norm.gain, weights.attn_norm.gain, *floats)}
    if kinds != {jnp.dtype(jnp.bfloat16)}:
        return f"not all {'arrays' if floats else 'activations and norms'} are bfloat16"
    found = _plan(attended, x, weights)
    return found if isinstance(found, str) else None


def _other_form(matrices: Sequence[GroupedMatrix]) -> str | None:
    """Return why the kernel does not support the form of 4-bit weights, or None if it does.

    It supports the form of `weights="int4"`, with or without minima.
    """
    for w in matrices:
        factors = [w.scale] if w.minimum is None else [w.scale, w.minimum]
        if w.scale_unit is not None or w.minimum_unit is not None:
            return "scales of 4-bit weights are quantised themselves"
        if kinds := {str(a.dtype) for a in factors} - {"float16"}:
            return f"scales of 4-bit weights are {kinds.pop()}, not float16"
        if w.levels.shape[1] != BYTES:
            return f"4-bit weights have groups of {2 * w.levels.shape[1]}, not {2 * BYTES}"
    some = {w.minimum is None for w in matrices}
    return "some 4-bit weights have minima and others do not" if len(some) > 1 else None


def _matrices(weights: BlockWeights) -> tuple[Matrix, ...]:
    return weights.o, weights.gate, weights.up, weights.down, weights.q, weights.k, weights.v


def _plan(attended: Array, x: Array, weights: BlockWeights) -> Plan | str:
    heads = weights.q.shape[0], weights.k.shape[0]
    rows, inputs = attended.shape
    bits = BITS["floats" if isinstance(weights.o, jax.Array) else weights.o.kind]
    return plan(rows, inputs, x.shape[1], weights.gate.shape[0], heads, bits)


def fused_decode_block(
    attended: Array, x: Array, weights: BlockWeights, *, sizes: Plan | None = None
) -> tuple[Array, Array, Array, Array]:
    """Compute the residual stream and the next layer's q, k and v; see the public function.

    Args:
        sizes: sizes to use instead of those of `plan`.
    """
    found = _plan(attended, x, weights) if sizes is None else sizes
    assert isinstance(found, Plan)
    eps = weights.mlp_norm.eps, weights.attn_norm.eps
    matrices = _matrices(weights)
    gains = weights.mlp_norm.gain, weights.attn_norm.gain
    levels = tuple(w if isinstance(w, jax.Array) else w.levels for w in matrices)
    scales = tuple(_factors(w) for w in matrices if not isinstance(w, jax.Array))
    return _call(attended, x, gains, levels, scales, sizes=found, eps=eps)


def _factors(w: Int8Matrix | GroupedMatrix) -> Any:
    """Return the scales of int8 outputs, or the scales and minima of groups."""
    if isinstance(w, Int8Matrix):
        return w.scale.astype(jnp.float32)
    return (w.scale,) if w.minimum is None else (w.scale, w.minimum)


@jax.jit(static_argnames=("sizes", "eps"))
def _call(
    attended: Array,
    x: Array,
    gains: tuple[Array, Array],
    matrices: tuple[Array, ...],
    scales: tuple[Any, ...],
    *,
    sizes: Plan,
    eps: tuple[float, float],
) -> tuple[Array, Array, Array, Array]:
    """Call the kernel. It is traced and lowered once for all layers.

    Args:
        attended, x: as for `fused_decode_block`.
        gains: of the norms before the MLP and before the next layer's attention.
        matrices: weights in bfloat16, or their codes.
        scales: per quantised matrix, the scales of its outputs, or the scales and minima of its groups. Empty for
            bfloat16.
        sizes: sizes of a program's share.
        eps: of the same norms.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from . import epilogue, grid_barrier, loads
    from . import int4 as in_groups
    from . import int8 as in_levels

    batch, parts = sizes.rows, sizes.parts
    narrow, wide, (share_q, share_k) = sizes.outputs, sizes.wide, sizes.heads
    chunk_size, slots, resident, warpgroups = sizes.chunk, sizes.slots, sizes.inputs, sizes.warpgroups
    width, inner = matrices[0].shape[0], matrices[1].shape[0]
    counts = [size // parts // chunk_size for size in (attended.shape[1], width, inner)]
    of_attended, of_width, of_inner = counts
    quantized, grouped = sizes.bits == 8, sizes.bits == 4
    blocks = {"o": sizes.blocks(narrow), "wide": wide * parts // HALF, "q": sizes.blocks(share_q)}
    if grouped:  # the gate and up projections alternate
        blocks["wide"] = 2 * sizes.blocks(wide)
    a_block, a_half = ROWS // parts, HALF // parts  # outputs
    apart = share_k * parts == ROWS  # k and v have one block each, not half a block
    pair = 2 if apart else 1
    # A warpgroup must observe every phase of a barrier that it waits on. A slot therefore has one barrier per
    # warpgroup, unless the same warpgroup always consumes it.
    fixed = sizes.bits == 16 and slots % warpgroups == 0
    wide_columns = columns(wide)
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    narrow_layout = plgpu.Layout.WG_STRIDED((8, 64), vec_size=4)
    wide_layout = plgpu.Layout.WG_STRIDED((8, wide_columns), vec_size=wide_columns // 16)

    def split(a: Array) -> Array:
        if grouped:  # 4-bit: one row of bytes per member and output
            return a.reshape(-1, a.shape[-1])
        return a.reshape(a.shape[0] * parts, a.shape[1] // parts)

    def body(
        attended_ref: Any, x_ref: Any, mlp_gain_ref: Any, attn_gain_ref: Any, o_ref: Any, gate_ref: Any, up_ref: Any,
        down_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, scale_refs: tuple[Any, ...], counters_ref: Any,
        x_out: Any, q_out: Any, k_out: Any, v_out: Any, normed_ref: Any, gated_ref: Any, next_ref: Any,
        squares_ref: Any, next_squares_ref: Any,
        weights_smem: Any, inputs_smem: Any, sums_smem: Any, wide_smem: Any, x_smem: Any, gains_smem: Any,
        all_squares_smem: Any, roots_smem: Any,
        slot_full: Any, slot_empty: Any, inputs_ready: Any, chunk_full: Any, squares_ready: Any, inputs_begun: Any,
        consumers: Any,
        factors_smem: tuple[Any, ...],
    ) -> None:  # fmt: skip
        program, role = jax.lax.axis_index("program"), jax.lax.axis_index("role")
        gain_refs = mlp_gain_ref, attn_gain_ref
        scales_smem: Any = factors_smem[0] if factors_smem else None
        group_sums_smem: Any = factors_smem[1] if grouped else None
        how = loads.Inputs(tiled(2), batch, parts, chunk_size, grouped)

        def _copy_weights() -> None:
            plgpu.barrier_wait(inputs_begun)  # the first inputs are loaded before weights

            def issue(slot: int, count: int, chunks: int, copy_chunk: Callable[..., None]) -> int:
                """Issue the copies of a matmul's weights.

                Args:
                    slot: number of chunks copied before. The first chunk is in slot `slot` modulo `slots`.
                    count: number of blocks, or of pairs of blocks that share slots.
                    chunks: chunks per block.
                    copy_chunk: copies one chunk of a block, given their indices, the slot, and the barrier to signal.

                Returns:
                    The number of chunks copied so far.
                """
                whole = sizes.whole(count, chunks)

                def fill(i: Array, _: None) -> None:
                    block, chunk = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
                    at = jax.lax.rem(slot + i, slots)
                    nth = block if whole else slot + i
                    ready = slot_full.at[at if fixed else jax.lax.rem(nth, warpgroups) * slots + at]

                    @pl.when(slot + i >= slots)
                    def _wait() -> None:
                        plgpu.barrier_wait(slot_empty.at[at])

                    copy_chunk(block, chunk, at, ready)

                jax.lax.fori_loop(0, count * chunks, fill, None)
                return slot + count * chunks

            def halves(refs: Sequence[tuple[Any, Any]], rows: int, step: int) -> Callable[..., None]:
                """Return a `copy_chunk` for blocks of two halves.

                Args:
                    refs: matrix of each half, and the row of the view at which its first block begins.
                    rows: rows per half.
                    step: rows from one block to the next.
                """

                def copy_chunk(block: Array, chunk: Array, at: Array, ready: Any) -> None:
                    for half, (ref, first) in enumerate(refs):
                        taken = ref.at[pl.ds(first + block * step, rows), pl.ds(chunk * chunk_size, chunk_size)]
                        plgpu.copy_gmem_to_smem(taken, weights_smem.at[at, pl.ds(half * HALF, rows)], ready)

                return copy_chunk

            def both(ref: Any, first: Any, step: int = ROWS) -> Callable[..., None]:
                return halves([(ref, first), (ref, first + HALF)], HALF, step)

            def alternating(narrow: int, *which: int) -> Callable[..., None]:
                """Return a `copy_chunk` for blocks of 4-bit weights, taken from several matrices in alternation.

                Args:
                    narrow: outputs of each matrix per program.
                    which: indices of the matrices.
                """
                rows = sizes.tall(narrow) * ROWS // parts

                def copy_chunk(block: Array, chunk: Array, at: Array, ready: Any) -> None:
                    output = program * narrow + jax.lax.div(block, len(which)) * rows
                    line = pl.ds(chunk * LINE, LINE)

                    def copy(matrix: int) -> None:
                        levels = matrix_refs[matrix].at[pl.ds(output * BYTES, rows * BYTES), line]
                        plgpu.copy_gmem_to_smem(levels, weights_smem.at[at, pl.ds(0, rows * BYTES)], ready)
                        for kind, ref in enumerate(scale_refs[matrix]):
                            taken = ref.at[pl.ds(output, rows), line]
                            plgpu.copy_gmem_to_smem(taken, scales_smem.at[at, kind, pl.ds(0, rows)], ready)

                    for nth, matrix in enumerate(which):
                        if len(which) == 1:
                            copy(matrix)
                        else:
                            pl.when(jax.lax.rem(block, len(which)) == nth)(lambda matrix=matrix: copy(matrix))

                return copy_chunk

            if grouped:
                matrix_refs = o_ref, gate_ref, up_ref, down_ref, q_ref, k_ref, v_ref
                slot = issue(0, blocks["o"], of_attended, alternating(narrow, 0))
                slot = issue(slot, blocks["wide"], of_width, alternating(wide, 1, 2))
                slot = issue(slot, blocks["o"], of_inner, alternating(narrow, 3))
                slot = issue(slot, blocks["q"], of_width, alternating(share_q, 4))
                issue(slot, pair, of_width, alternating(share_k, 5, 6))
                return
            at, at_wide, at_q, at_k = (program * count * parts for count in (narrow, wide, share_q, share_k))
            slot = issue(0, blocks["o"], of_attended, both(o_ref, at))
            slot = issue(slot, blocks["wide"], of_width, halves([(gate_ref, at_wide), (up_ref, at_wide)], HALF, HALF))
            slot = issue(slot, blocks["o"], of_inner, both(down_ref, at))
            slot = issue(slot, blocks["q"], of_width, both(q_ref, at_q))
            if apart:
                slot = issue(slot, 1, of_width, both(k_ref, at_k, 0))
                issue(slot, 1, of_width, both(v_ref, at_k, 0))
            else:
                issue(slot, 1, of_width, halves([(k_ref, at_k), (v_ref, at_k)], share_k * parts, 0))

        @pl.when(role == warpgroups)
        def _produce() -> None:
            plgpu.set_max_registers(40, action="decrease")
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(_copy_weights))

        def copy_inputs(ref: Any, chunk: Any) -> None:
            """Issue the TMA copy of a chunk of inputs."""
            at = jax.lax.rem(jnp.asarray(chunk, jnp.int32), resident)
            taken = ref.at[:, pl.ds(chunk * chunk_size, chunk_size)]
            plgpu.copy_gmem_to_smem(taken, inputs_smem.at[at], chunk_full.at[at])

        def fetch(ref: Any, chunks: int, squares: Any = None, begun: bool = True) -> None:
            """Load inputs and every program's sums of their squares.

            If the inputs do not fit into shared memory, only issue TMA copies of the first chunks.

            Args:
                ref: inputs in global memory.
                chunks: number of chunks.
                squares: sums of squares, if the inputs are normed.
                begun: whether the producer warp already copies weights. If not, it starts once the first inputs are
                    requested.
            """
            if chunks > resident:
                # Only the MLP's inputs can be that large.
                assert begun
                assert squares is None
                for chunk in range(resident):
                    copy_inputs(ref, chunk)
                return
            others = None if squares is None else loads.read_squares(squares)
            steps = how.steps(chunks)
            for first in range(0, steps, AT_ONCE):
                taken = range(first, min(first + AT_ONCE, steps))
                words = loads.read_inputs(ref, how, taken)
                if not (begun or first):
                    plgpu.barrier_arrive(inputs_begun)
                loads.write_inputs(words, inputs_smem, how, taken, group_sums_smem)
            if not quantized:
                plgpu.commit_smem()  # wgmma reads this from shared memory
            plgpu.barrier_arrive(inputs_ready)
            if others is not None:
                loads.write_squares(others, all_squares_smem)
                plgpu.barrier_arrive(squares_ready)

        def multiply_floats(total: Any, at: Any, inputs_at: Any) -> None:
            """Add the products of slot `at` with the chunk of inputs at `inputs_at` to `total`, and free the slot."""
            plgpu.wgmma(total, weights_smem.at[at], inputs_smem.at[inputs_at].T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(slot_empty.at[at])

        def multiply_codes(total: Array, at: Any, inputs_at: Any) -> Array:
            """Do the same for int8 weights. The slot is free as soon as its codes are in registers."""
            levels = in_levels.load_codes(weights_smem.at[at], tiled(1))
            plgpu.barrier_arrive(slot_empty.at[at])
            return in_levels.multiply_codes(total, levels, inputs_smem.at[inputs_at], tiled(2))

        def multiply_groups(sums: Any, at: Any, inputs_at: Any) -> Any:
            """Do the same for 4-bit weights. `sums` has `total` and `rest` per block of a slot; see `int4.py`."""
            found = []
            for tile, (total, rest) in enumerate(sums):
                words = in_groups.take(weights_smem.at[at], scales_smem.at[at], tile)
                if tile == len(sums) - 1:
                    plgpu.barrier_arrive(slot_empty.at[at])
                inputs = inputs_smem.at[inputs_at], group_sums_smem.at[inputs_at]
                found.append(in_groups.add(words, *inputs, total, rest))
            return tuple(found)

        def multiply(
            slot: int, count: int, chunks: int, ref: Any, place: Callable[[Any], tuple[Any, Any]], second: int = 0,
            eps: float | None = None, again: bool = False, scales: Any = None, tall: int = 1,
        ) -> int:  # fmt: skip
            """Multiply blocks of weights by inputs. The warpgroups alternate by chunks, or by blocks.

            Args:
                slot: number of chunks of weights multiplied before; see `issue`.
                count: number of blocks, or of pairs of blocks that share slots.
                chunks: chunks per block.
                ref: inputs in global memory.
                place: returns the array in shared memory and the first column of a block's outputs.
                second: offset of the second half's column; see `add_diagonals`.
                eps: of the norm of these inputs, None if they are not normed.
                again: whether inputs and inverse roots are already in shared memory.
                scales: scales of the outputs, by columns of the array, for int8 weights.
                tall: blocks per slot.

            Returns:
                The number of chunks multiplied so far.
            """
            phased = chunks > resident  # the inputs do not fit into shared memory at once
            whole = sizes.whole(count, chunks)
            roots = None if eps is None else roots_smem.at[role]

            def block(nth: Array, _: None) -> None:
                i = role + warpgroups * nth if whole else nth
                start = slot + i * chunks
                # The warpgroups alternate by slots, or each has all slots of its own blocks.
                first, step = 0, 1
                if not whole:
                    turn = role + (warpgroups - 1) * start if warpgroups > 2 else role + start
                    first, step = jax.lax.rem(turn, warpgroups), warpgroups

                def add_up(total: Any) -> Any:
                    """Add the products of all chunks to `total`, or return them if `total` is None."""

                    def add(j: Array, sums: Any) -> Any:
                        chunk = first + step * j
                        at, inputs_at = jax.lax.rem(start + chunk, slots), jax.lax.rem(chunk, resident)
                        if phased:
                            plgpu.barrier_wait(chunk_full.at[inputs_at])
                        plgpu.barrier_wait(slot_full.at[at if fixed else role * slots + at])
                        if grouped:
                            sums = multiply_groups(sums, at, inputs_at)
                        elif quantized:
                            sums = multiply_codes(sums, at, inputs_at)
                        else:
                            multiply_floats(total, at, inputs_at)
                        if phased:

                            @pl.when(chunk + resident < chunks)
                            def _next() -> None:
                                copy_inputs(ref, chunk + resident)

                        return sums

                    nothing = plgpu.layout_cast(jnp.zeros(size, float32), plgpu.Layout.WGMMA) if total is None else None
                    begin = ((nothing, nothing),) * tall if grouped else nothing
                    return jax.lax.fori_loop(0, jax.lax.div(chunks - first + step - 1, step), add, begin)

                size = ROWS, batch * parts
                if grouped:
                    products = tuple(in_groups.joined(*each) for each in add_up(None))
                elif quantized:
                    products = (add_up(None),)
                else:

                    def accumulated(total: Any) -> Array:
                        add_up(total)
                        return total[...]

                    products = (pl.run_scoped(accumulated, plgpu.WGMMAAccumulatorRef(size, float32)),)

                if (added := eps) is not None and not again:

                    @pl.when(nth == 0)
                    def _roots() -> None:
                        plgpu.barrier_wait(squares_ready)
                        epilogue.inverse_roots(all_squares_smem, roots, depth=width, eps=added)

                out, column = place(i)
                for tile, product in enumerate(products):
                    first_column = column + tile * a_block if tile else column
                    epilogue.add_diagonals(
                        product, out, first_column, parts=parts, second=second, scale=roots, scales=scales
                    )

            if not (phased or again):
                plgpu.barrier_wait(inputs_ready)
            own_blocks = jax.lax.div(count - role + warpgroups - 1, warpgroups) if whole else count
            jax.lax.fori_loop(0, own_blocks, block, None)
            return slot + count * chunks

        def added_up(partials: Sequence[Any], layout: Any) -> Array:
            """Add the partial sums of all warpgroups and round them to bfloat16."""
            first, *others = (epilogue.load(partial, layout) for partial in partials)
            for other in others:
                first += other
            return first.astype(bfloat16)

        def places(sums: Any, count: int, chunks: int) -> list[Any]:
            """Return the arrays with results: one if each warpgroup computes whole blocks, else one per warpgroup."""
            return [sums.at[i] for i in range(1 if sizes.whole(count, chunks) else warpgroups)]

        def join(gain: int, chunks: int, ref: Any, squares: Any, last: bool = False) -> None:
            """Add a result to the residual stream, and store the inputs of the next matmul for all programs."""
            product = added_up(places(sums_smem, blocks["o"], chunks), narrow_layout)
            x = product.astype(float32) + epilogue.load(x_smem, narrow_layout).astype(float32)
            x = x.astype(bfloat16)
            exact = x.astype(float32)
            gains = epilogue.load(gains_smem.at[gain], narrow_layout).astype(float32)
            grid_barrier.publish((exact * gains).astype(bfloat16), ref, program * narrow, rows=batch, count=narrow)
            grid_barrier.publish_sums(exact * exact, squares, program)
            if last:
                grid_barrier.publish(x, x_out, program * narrow, rows=batch, count=narrow)
            else:
                x_smem[...] = x

        def gathered(half: int, count: int) -> Array:
            """Return results from `wide_smem`: of gate or q in half 0, of up, or k and v, in half 1."""
            return added_up(places(wide_smem.at[:, half], count, of_width), wide_layout)

        @pl.when(role < warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(REGISTERS[warpgroups], action="increase")
            rows = pl.ds(0, 2), 2, 3, 4, 5
            of_wide, of_o, of_down, of_q, of_kv = (scales_smem.at[row] if quantized else None for row in rows)

            def into(sums: Any, count: int, chunks: int) -> Any:
                """Return the array that this warpgroup writes results to; see `places`."""
                return sums.at[0 if sizes.whole(count, chunks) else role]

            def sync_consumers() -> None:
                """Wait for the other consumer warpgroups."""
                plgpu.barrier_arrive(consumers)
                plgpu.barrier_wait(consumers)

            def lead(work: Callable[[], None]) -> None:
                """Do work in the first warpgroup, once all warpgroups have finished a matmul."""
                sync_consumers()
                pl.when(role == 0)(work)

            def begin() -> None:
                """Load this program's share of the residual stream, norms and scales."""
                for i in range(warpgroups):
                    sums_smem[i] = jnp.zeros((8, 64), float32)
                x_smem[...] = jnp.zeros((8, 64), bfloat16)
                pieces = [
                    loads.Piece(x_ref, program * narrow, x_smem, narrow, batch),
                    *(
                        loads.Piece(ref, program * narrow, gains_smem.at[i], narrow, 8)
                        for i, ref in enumerate(gain_refs)
                    ),
                ]
                counts = narrow, wide, wide, narrow, share_q, share_k, share_k
                lines = (2, 0), (0, 0), (1, 0), (3, 0), (4, 0), (5, 0), (5, 64)
                for ref, count, (row, column) in zip(scale_refs, counts, lines, strict=True) if quantized else ():
                    out = scales_smem.at[row, pl.ds(column, count)]
                    pieces.append(loads.Piece(ref, program * count, out, count, factor=in_levels.DIVISOR))
                words = loads.read(pieces)
                plgpu.barrier_arrive(inputs_begun)
                epilogue.sync()
                loads.write(words, pieces)

            def gate() -> None:
                """Finish the output projection, and load the inputs of the gate and up projections."""
                join(0, of_attended, normed_ref, squares_ref)
                grid_barrier.grid_barrier(counters_ref, 0, 2, program)
                fetch(normed_ref, of_width, squares_ref)

            def down() -> None:
                """Finish the gate and up projections, and load the inputs of the down projection."""
                gate, up = (gathered(half, blocks["wide"]).astype(float32) for half in range(2))
                gated = (gate * up / (1 + jnp.exp(-gate))).astype(bfloat16)
                copied = of_inner > resident
                grid_barrier.publish(gated, gated_ref, program * wide, rows=batch, count=wide, copied=copied)
                grid_barrier.grid_barrier(counters_ref, 1, 0, program, copied=copied)
                fetch(gated_ref, of_inner)

            def heads() -> None:
                """Finish the down projection, and load the inputs of q, k and v."""
                join(1, of_inner, next_ref, next_squares_ref, last=True)
                grid_barrier.grid_barrier(counters_ref, 2, 1, program)
                fetch(next_ref, of_width, next_squares_ref)

            def end() -> None:
                """Store q, k and v."""
                queries, pairs = (gathered(half, count) for half, count in enumerate((blocks["q"], pair)))
                for numbers, ref, first, count in (
                    (queries, q_out, 0, share_q), (pairs, k_out, 0, share_k), (pairs, v_out, 64, share_k)
                ):  # fmt: skip
                    grid_barrier.publish(numbers, ref, program * count, rows=batch, count=count, column=first)

            def one_after_another(sums: Any, tall: int) -> Callable[[Any], tuple[Any, Any]]:
                """Return a `place` that puts the outputs of consecutive blocks side by side."""
                return lambda i: (sums, i * (tall * a_block))

            pl.when(role == 0)(lambda: fetch(attended_ref, of_attended, begun=False))
            pl.when(role == 1)(begin)
            sync_consumers()
            tall = sizes.tall(narrow)
            sums = into(sums_smem, blocks["o"], of_attended)
            slot = multiply(
                0, blocks["o"], of_attended, attended_ref, one_after_another(sums, tall), a_half, scales=of_o, tall=tall
            )
            lead(gate)
            gated, tall_wide = into(wide_smem, blocks["wide"], of_width), sizes.tall(wide)

            def place_of_wide(i: Any) -> tuple[Any, Any]:
                if not grouped:
                    return gated, i * a_half
                return gated.at[jax.lax.rem(i, 2)], jax.lax.div(i, 2) * tall_wide * a_block

            slot = multiply(
                slot, blocks["wide"], of_width, normed_ref, place_of_wide, a_half if grouped else 0, eps=eps[0],
                scales=of_wide, tall=tall_wide,
            )  # fmt: skip
            lead(down)
            sums = into(sums_smem, blocks["o"], of_inner)
            slot = multiply(
                slot, blocks["o"], of_inner, gated_ref, one_after_another(sums, tall), a_half, scales=of_down, tall=tall
            )
            lead(heads)
            queries, pairs = into(wide_smem, blocks["q"], of_width).at[0], into(wide_smem, pair, of_width).at[1]
            tall = sizes.tall(share_q)
            slot = multiply(
                slot, blocks["q"], of_width, next_ref, one_after_another(queries, tall), a_half, eps=eps[1],
                scales=of_q, tall=tall,
            )  # fmt: skip
            beside = a_half if apart else 64
            multiply(
                slot, pair, of_width, next_ref, lambda i: (pairs, i * 64), beside, eps=eps[1], again=True, scales=of_kv
            )
            lead(end)

    def tiled(size: int) -> tuple[Any, ...]:
        """Return the tiling and swizzle of numbers of `size` bytes in shared memory."""
        return plgpu.TilingTransform((8, SWIZZLE // size)), plgpu.SwizzleTransform(SWIZZLE)

    shape, smem, barrier = jax.ShapeDtypeStruct, plgpu.SMEM, plgpu.Barrier
    factors: list[Any] = []
    if quantized:
        factors = [smem((SCALES, wide_columns), float32)]
    if grouped:
        tall, kinds = sizes.most * ROWS // parts, len(scales[0])
        weights = smem((slots, tall * BYTES, LINE), jnp.uint8, transforms=in_groups.TILED)
        factors = [smem((slots, kinds, tall, LINE), jnp.float16), smem((resident, batch * parts * GROUPS), float32)]
    else:
        weights = smem((slots, ROWS, chunk_size), matrices[0].dtype, transforms=tiled(sizes.bits // 8))
    per_slot = 1 + len(scales[0]) if grouped else 2  # TMA copies
    # XLA does not know that the kernel writes the counters. This is safe: data dependencies order the calls, and a call
    # works with zeros as well as with the counters that the previous call left. Only the last barrier's counter is then
    # not zero, and the first barrier resets it.
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
        num_threads=warpgroups + 1,
        thread_name="role",
        scratch_types=[
            weights,
            smem((resident, batch * parts, chunk_size), bfloat16, transforms=tiled(2)),
            smem((warpgroups, 8, 64), float32),
            smem((warpgroups, 2, 8, wide_columns), float32),
            smem((8, 64), bfloat16),
            smem((2, 8, 64), bfloat16),
            smem((PROGRAMS, 8), float32),
            smem((warpgroups, 8), float32),
            barrier(num_arrivals=per_slot, num_barriers=slots if fixed else warpgroups * slots),
            barrier(num_barriers=slots),
            barrier(),
            barrier(num_barriers=resident if max(counts) > resident else 1),
            barrier(),
            barrier(num_arrivals=2),
            barrier(num_arrivals=warpgroups),
            tuple(factors),
        ],
        kernel_name="fused_decode_block",
    )(attended, x, *gains, *map(split, matrices), scales, counters)
    return out[0], out[1], out[2], out[3]
