"""From attention to attention in one kernel for Hopper GPUs, in Pallas' Mosaic dialect, with weights in bfloat16, int8 or 4 bits.

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
from ..projection import GroupedMatrix, Int8Matrix, Matrix
from .plan import BYTES, GROUPS, HALF, LINE, PROGRAMS, ROWS, SCALES, Plan, columns, plan
from .types import BlockWeights

SWIZZLE = 128
"""Bytes of a row of shared memory that are interleaved."""

REGISTERS = {2: 216, 3: 152}
"""Registers of a thread that multiplies, by how many warpgroups do: with those of the one that orders weights, all that there are."""

BITS = {"floats": 16, "int8": 8, "int4": 4}
"""Of a weight, by what it is held in."""

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
    if not held <= set(BITS):
        return f"weights are {held.pop()}"
    if (grouped := [w for w in matrices if isinstance(w, GroupedMatrix)]) and (reason := _other_form(grouped)):
        return reason
    floats = [w for w in matrices if isinstance(w, jax.Array)]
    kinds = {a.dtype for a in (attended, x, weights.mlp_norm.gain, weights.attn_norm.gain, *floats)}
    if kinds != {jnp.dtype(jnp.bfloat16)}:
        return f"not everything {'' if floats else 'but weights '}is bfloat16"
    found = _plan(attended, x, weights)
    return found if isinstance(found, str) else None


def _other_form(matrices: Sequence[GroupedMatrix]) -> str | None:
    """Why weights in 4 bits are not of the form that the kernel multiplies by, which is that of `weights="int4"`, or the same without minima."""
    for w in matrices:
        factors = [w.scale] if w.minimum is None else [w.scale, w.minimum]
        if w.scale_unit is not None or w.minimum_unit is not None:
            return "scales of weights in 4 bits count units"
        if kinds := {str(a.dtype) for a in factors} - {"float16"}:
            return f"scales of weights in 4 bits are {kinds.pop()}, not float16"
        if w.levels.shape[1] != BYTES:
            return f"groups of weights in 4 bits are of {2 * w.levels.shape[1]}, not {2 * BYTES}"
    some = {w.minimum is None for w in matrices}
    return "some weights in 4 bits have minima and others none" if len(some) > 1 else None


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
    """The residual stream, the next layer's q, k and v; see the public function.

    Args:
        sizes: instead of those that `plan` finds.
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
    """Scales of outputs, or scales and perhaps minima of groups."""
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
    """The kernel, traced and lowered once for all layers.

    Args:
        matrices: of floats, or levels.
        scales: of the outputs of each matrix of levels, or of its groups, with their minima if they have any; none for floats.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from . import groups as in_groups
    from . import lanes

    batch, parts = sizes.rows, sizes.parts
    own, wide, (own_q, own_k) = sizes.outputs, sizes.wide, sizes.heads
    chunk, slots, held, groups = sizes.chunk, sizes.slots, sizes.inputs, sizes.warpgroups
    width, inner = matrices[0].shape[0], matrices[1].shape[0]
    counts = [size // parts // chunk for size in (attended.shape[1], width, inner)]
    of_attended, of_width, of_inner = counts
    quantized, grouped = sizes.bits == 8, sizes.bits == 4
    blocks = {"o": sizes.blocks(own), "wide": wide * parts // HALF, "q": sizes.blocks(own_q)}
    if grouped:  # of the gate and of the up projection by turns
        blocks["wide"] = 2 * sizes.blocks(wide)
    a_block, a_half = ROWS // parts, HALF // parts
    apart = own_k * parts == ROWS  # k and v have a block each, not a half
    pair = 2 if apart else 1
    # Who waits at a barrier must see all of its turns. So a slot has a barrier for each warpgroup, unless it is always the same one's.
    fixed = sizes.bits == 16 and slots % groups == 0
    wide_columns = columns(wide)
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    narrow_layout = plgpu.Layout.WG_STRIDED((8, 64), vec_size=4)
    wide_layout = plgpu.Layout.WG_STRIDED((8, wide_columns), vec_size=wide_columns // 16)

    def split(a: Array) -> Array:
        if grouped:  # 4 bits: a row of bytes for each member and output
            return a.reshape(-1, a.shape[-1])
        return a.reshape(a.shape[0] * parts, a.shape[1] // parts)

    def shape_of_inputs(size: int) -> tuple[int, ...]:
        """Parts of each row; for 4 bits those of a chunk, and then those of the next one."""
        return (batch, size // chunk, chunk) if grouped else (batch * parts, size // parts)

    def body(
        attended_ref: Any, x_ref: Any, mlp_gain_ref: Any, attn_gain_ref: Any, o_ref: Any, gate_ref: Any, up_ref: Any,
        down_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, scale_refs: tuple[Any, ...], counters_ref: Any,
        x_out: Any, q_out: Any, k_out: Any, v_out: Any, normed_ref: Any, gated_ref: Any, next_ref: Any,
        squares_ref: Any, next_squares_ref: Any,
        weights_smem: Any, inputs_smem: Any, sums_smem: Any, wide_smem: Any, x_smem: Any, gains_smem: Any,
        normed_smem: Any, out_smem: Any, squares_smem: Any, all_squares_smem: Any, roots_smem: Any,
        filled: Any, emptied: Any, arrived: Any, turned: Any, counted: Any, together: Any, scales_smem: Any = None,
        group_sums_smem: Any = None,
    ) -> None:  # fmt: skip
        program, role = jax.lax.axis_index("program"), jax.lax.axis_index("role")

        @pl.when(role == groups)
        def _order() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def order(slot: int, count: int, chunks: int, take: Callable[..., None]) -> int:
                """Chunks of `count` blocks, of which `take` orders one."""
                whole = sizes.whole(count, chunks)

                def fill(i: Array, _: None) -> None:
                    block, part = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
                    at = jax.lax.rem(slot + i, slots)
                    turn = block if whole else slot + i
                    ready = filled.at[at if fixed else jax.lax.rem(turn, groups) * slots + at]

                    @pl.when(slot + i >= slots)
                    def _wait() -> None:
                        plgpu.barrier_wait(emptied.at[at])

                    take(block, part, at, ready)

                jax.lax.fori_loop(0, count * chunks, fill, None)
                return slot + count * chunks

            def halves(refs: Sequence[tuple[Any, Any]], rows: int, step: int) -> Callable[..., None]:
                """Blocks of two halves of `rows` rows, the first from a row of a matrix on."""

                def take(block: Array, part: Array, at: Array, ready: Any) -> None:
                    for half, (ref, first) in enumerate(refs):
                        taken = ref.at[pl.ds(first + block * step, rows), pl.ds(part * chunk, chunk)]
                        plgpu.copy_gmem_to_smem(taken, weights_smem.at[at, pl.ds(half * HALF, rows)], ready)

                return take

            def both(ref: Any, first: Any, step: int = ROWS) -> Callable[..., None]:
                return halves([(ref, first), (ref, first + HALF)], HALF, step)

            def in_turns(own: int, *which: int) -> Callable[..., None]:
                """Blocks in 4 bits, of several matrices by turns, of which a program has so many outputs each."""
                rows = sizes.tall(own) * ROWS // parts

                def take(block: Array, part: Array, at: Array, ready: Any) -> None:
                    output = program * own + jax.lax.div(block, len(which)) * rows
                    groups = pl.ds(part * LINE, LINE)

                    def copy(matrix: int) -> None:
                        levels = matrix_refs[matrix].at[pl.ds(output * BYTES, rows * BYTES), groups]
                        plgpu.copy_gmem_to_smem(levels, weights_smem.at[at, pl.ds(0, rows * BYTES)], ready)
                        for kind, ref in enumerate(scale_refs[matrix]):
                            taken = ref.at[pl.ds(output, rows), groups]
                            plgpu.copy_gmem_to_smem(taken, scales_smem.at[at, kind, pl.ds(0, rows)], ready)

                    for turn, matrix in enumerate(which):
                        if len(which) == 1:
                            copy(matrix)
                        else:
                            pl.when(jax.lax.rem(block, len(which)) == turn)(lambda matrix=matrix: copy(matrix))

                return take

            if grouped:
                matrix_refs = o_ref, gate_ref, up_ref, down_ref, q_ref, k_ref, v_ref
                slot = order(0, blocks["o"], of_attended, in_turns(own, 0))
                slot = order(slot, blocks["wide"], of_width, in_turns(wide, 1, 2))
                slot = order(slot, blocks["o"], of_inner, in_turns(own, 3))
                slot = order(slot, blocks["q"], of_width, in_turns(own_q, 4))
                order(slot, pair, of_width, in_turns(own_k, 5, 6))
                return
            at, at_wide, at_q, at_k = (program * count * parts for count in (own, wide, own_q, own_k))
            slot = order(0, blocks["o"], of_attended, both(o_ref, at))
            slot = order(slot, blocks["wide"], of_width, halves([(gate_ref, at_wide), (up_ref, at_wide)], HALF, HALF))
            slot = order(slot, blocks["o"], of_inner, both(down_ref, at))
            slot = order(slot, blocks["q"], of_width, both(q_ref, at_q))
            if apart:
                slot = order(slot, 1, of_width, both(k_ref, at_k, 0))
                order(slot, 1, of_width, both(v_ref, at_k, 0))
            else:
                order(slot, 1, of_width, halves([(k_ref, at_k), (v_ref, at_k)], own_k * parts, 0))

        def fetch_one(ref: Any, part: Any, barriers: Any) -> None:
            at = jax.lax.rem(jnp.asarray(part, jnp.int32), held)
            taken = ref.at[:, pl.ds(part * parts, parts)] if grouped else ref.at[:, pl.ds(part * chunk, chunk)]
            plgpu.copy_gmem_to_smem(taken, inputs_smem.at[at], barriers.at[at])

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

        def multiply_groups(sums: Any, at: Any, inputs_at: Any) -> Any:
            """The same for weights in 4 bits; for each block of a slot `sums` has products, and a rest."""
            found = []
            for tile, (total, rest) in enumerate(sums):
                words = in_groups.take(weights_smem.at[at], scales_smem.at[at], tile)
                if tile == len(sums) - 1:
                    plgpu.barrier_arrive(emptied.at[at])
                inputs = inputs_smem.at[inputs_at], group_sums_smem.at[inputs_at]
                found.append(in_groups.add(words, *inputs, total, rest))
            return tuple(found)

        def see(inputs_at: Any) -> None:
            """Wait for a chunk of inputs."""
            plgpu.barrier_wait(arrived.at[inputs_at])
            if grouped:  # Every warpgroup writes the same sums, so that none has to wait for another's.
                in_groups.add_up(inputs_smem.at[inputs_at], group_sums_smem.at[inputs_at])

        def multiply(
            slot: int, count: int, chunks: int, ref: Any, place: Callable[[Any], tuple[Any, Any]], second: int = 0,
            eps: float | None = None, again: bool = False, scales: Any = None, tall: int = 1,
        ) -> int:  # fmt: skip
            """Products of `count` blocks with the inputs in `ref`; of the warpgroups each takes every so manieth chunk, or block.

            Args:
                place: the array that a block's go into, and the column that they begin in.
                eps: of the norm of these inputs, if they are normed.
                again: whether inputs and roots are there already.
                scales: of the outputs, by columns of the array, if weights are levels of int8.
                tall: blocks of `ROWS` rows in each of these.
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

                def add_up(total: Any) -> Any:
                    def add(j: Array, sums: Any) -> Any:
                        part = first + step * j
                        at, inputs_at = jax.lax.rem(start + part, slots), jax.lax.rem(part, held)
                        if turns:
                            plgpu.barrier_wait(turned.at[inputs_at])
                        pl.when(fresh)(lambda: see(inputs_at))
                        plgpu.barrier_wait(filled.at[at if fixed else role * slots + at])
                        if grouped:
                            return multiply_groups(sums, at, inputs_at)
                        multiply_chunk(total, at, inputs_at)
                        if turns:

                            @pl.when(part + held < chunks)
                            def _next() -> None:
                                fetch_one(ref, part + held, turned)

                    nothing = None
                    if grouped:
                        zeros = plgpu.layout_cast(jnp.zeros((ROWS, batch * parts), float32), plgpu.Layout.WGMMA)
                        nothing = ((zeros, zeros),) * tall
                    sums = jax.lax.fori_loop(0, jax.lax.div(chunks - first + step - 1, step), add, nothing)
                    return tuple(in_groups.joined(*each) for each in sums) if grouped else total[...]

                if grouped:
                    products = add_up(None)
                else:
                    products = pl.run_scoped(add_up, plgpu.WGMMAAccumulatorRef((ROWS, batch * parts), float32))

                if not whole:

                    @pl.when(fresh)
                    def _others() -> None:
                        """Of every barrier each turn is waited for, or the next one would be taken for it."""
                        for other in range(1, groups):
                            begin: Any = 1 - first if groups == 2 else jax.lax.rem(first + other, groups)

                            def wait(j: Array, _: None, begin: Any = begin) -> None:
                                see(begin + groups * j)

                            jax.lax.fori_loop(0, jax.lax.div(chunks - begin + groups - 1, groups), wait, None)

                if (added := eps) is not None and not again:

                    @pl.when(turn == 0)
                    def _roots() -> None:
                        plgpu.barrier_wait(counted)
                        lanes.inverse_roots(all_squares_smem, roots, depth=width, eps=added)

                out, column = place(i)
                for tile, product in enumerate(products if grouped else (products,)):
                    first_column = column + tile * a_block if tile else column
                    lanes.add_diagonals(
                        product, out, first_column, parts=parts, second=second, scale=roots, scales=scales
                    )

            own_blocks = jax.lax.div(count - role + groups - 1, groups) if whole else count
            jax.lax.fori_loop(0, own_blocks, block, None)
            return slot + count * chunks

        def put(smem: Any, count: int, ref: Any) -> None:
            """A program's `count` columns of every row, into inputs of the next product."""
            if grouped:
                in_groups.hand_on(smem, ref, program * count, count=count)
                return
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

            def one_after_another(sums: Any, tall: int) -> Callable[[Any], tuple[Any, Any]]:
                return lambda i: (sums, i * (tall * a_block))

            lead(begin)
            everyone()
            tall = sizes.tall(own)
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
            tall = sizes.tall(own_q)
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
        """How numbers of so many bytes lie in shared memory."""
        return plgpu.TilingTransform((8, SWIZZLE // size)), plgpu.SwizzleTransform(SWIZZLE)

    shape, smem, barrier = jax.ShapeDtypeStruct, plgpu.SMEM, plgpu.Barrier
    beside: list[Any] = []
    if quantized:
        beside = [smem((SCALES, wide_columns), float32)]
    if grouped:
        tall, kinds = sizes.most * ROWS // parts, len(scales[0])
        weights = smem((slots, tall * BYTES, LINE), jnp.uint8, transforms=in_groups.TILED)
        beside = [smem((slots, kinds, tall, LINE), jnp.float16), smem((held, batch * parts * GROUPS), float32)]
    else:
        weights = smem((slots, ROWS, chunk), matrices[0].dtype, transforms=tiled(sizes.bits // 8))
    # XLA is not told that these are written. It need not know: calls follow one another, as each takes what the one before made, and a call
    # does as well with zeros as with what another has left, in which only the last meeting's counter is not zero; the first clears it.
    counters = jnp.zeros(COUNTERS, jnp.int32)
    out = plgpu.kernel(
        body,
        out_type=[
            shape(x.shape, bfloat16),
            *(shape((batch, w.shape[0]), bfloat16) for w in matrices[4:]),
            *(shape(shape_of_inputs(size), bfloat16) for size in (width, inner, width)),
            *(shape((PROGRAMS, 8), float32) for _ in range(2)),
        ],
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="role",
        scratch_types=[
            weights,
            smem((held, *((batch, parts) if grouped else (batch * parts,)), chunk), bfloat16, transforms=tiled(2)),
            smem((groups, 8, 64), float32),
            smem((groups, 2, 8, wide_columns), float32),
            smem((8, 64), bfloat16),
            smem((2, 8, 64), bfloat16),
            smem((8, 64), bfloat16),
            smem((2, 8, wide_columns), bfloat16),
            smem((8,), float32),
            smem((PROGRAMS, 8), float32),
            smem((groups, 8), float32),
            barrier(num_arrivals=1 + len(scales[0]) if grouped else 2, num_barriers=slots if fixed else groups * slots),
            barrier(num_barriers=slots),
            barrier(num_barriers=held),
            barrier(num_barriers=held),
            barrier(),
            barrier(num_arrivals=groups),
            *beside,
        ],
        kernel_name="fused_decode_block",
    )(attended.reshape(shape_of_inputs(attended.shape[1])), x, *gains, *map(split, matrices), scales, counters)
    return out[0], out[1], out[2], out[3]
