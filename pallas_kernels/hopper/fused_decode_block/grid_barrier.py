"""Grid barriers of the Hopper kernel, and stores of results that other programs read, in Mosaic's MLIR dialect.

After each matmul, `pallas_mosaic_gpu.py` calls `publish` for a program's outputs, then `grid_barrier`. Every program
can then load the outputs of all programs, which are the inputs of the next matmul.
"""

import math
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxtyping import Array

from .mlir_helpers import (
    REF,
    SCALAR,
    address_of,
    below,
    equal,
    if_then,
    indices,
    inline,
    int_of,
    item,
    sum_over,
    thread_index,
    warp_and_lane,
)
from .plan import PROGRAMS


def publish(
    numbers: Array, out: Any, first: Array, *, rows: int, count: int, column: int = 0, copied: bool = False
) -> None:
    """Store columns [column, column + count) of bfloat16 numbers [8, _] in global memory, for all programs.

    Args:
        numbers: the values; 16 threads share a row.
        out: array with `rows` rows, in any shape.
        first: first column in `out`.
        rows: number of rows.
        count: number of columns.
        column: first column of `numbers`.
        copied: whether TMA copies will read the result, which requires a proxy fence.
    """
    columns, width = numbers.shape[1], math.prod(out.shape) // rows
    layout = plgpu.Layout.WG_STRIDED((8, columns), vec_size=columns // 16)

    @inline(layout, REF, SCALAR)
    def _write(_: Any, numbers: Any, out: Any, first: Any) -> None:
        row, piece = arith.divui(thread_index(), int_of(16)), arith.remui(thread_index(), int_of(16))
        start = arith.muli(piece, int_of(columns // 16))
        (register,) = numbers.registers.flat
        pair_of = ir.VectorType.get((2,), ir.BF16Type.get())
        for pair in range(columns // 32):
            place = arith.subi(arith.addi(start, int_of(2 * pair)), int_of(column))
            # unsigned, so columns before `column` are excluded too
            with if_then(arith.andi(below(row, rows), below(place, count))):
                number = arith.addi(arith.muli(row, int_of(width)), arith.addi(first.registers.item(), place))
                there = llvm.inttoptr(llvm.PointerType.get(1), address_of(out, arith.muli(number, int_of(2))))
                two = [item(register, 2 * pair + i) for i in range(2)]
                llvm.store(vector.from_elements(pair_of, two), there, alignment=4)
                scf.yield_([])
        if copied:
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True)

    _write(numbers, out, first)


def publish_sums(x: Array, out: Any, program: Array) -> None:
    """Store the sum of each row of x [8, 64] in a program's row of global memory [programs, 8].

    16 threads share a row of x.
    """

    @inline(plgpu.Layout.WG_STRIDED((8, 64), vec_size=4), REF, SCALAR)
    def _write(_: Any, x: Any, out: Any, program: Any) -> None:
        warp, lane = warp_and_lane()
        first, *others = (item(register, place) for register in x.registers.flat for place in range(4))
        for other in others:
            first = arith.addf(first, other)
        total = sum_over(first, [1, 2, 4, 8])
        with if_then(equal(arith.remui(lane, int_of(16)), int_of(0))):
            row = arith.addi(arith.muli(warp, int_of(2)), arith.divui(lane, int_of(16)))
            memref.store(total, out, indices(program.registers.item(), row))
            scf.yield_([])

    _write(x, out, program)


def grid_barrier(counters: Any, which: int, previous: int, program: Array, *, copied: bool = False) -> None:
    """Wait until every program has arrived. What each has written is then visible to all.

    Args:
        counters: at least three counters in global memory, all zero before the first call.
        which: index of the counter for this barrier.
        previous: index of the previous barrier's counter, which is reset to zero.
        program: index of this program.
        copied: whether TMA copies will read what was written.
    """

    @inline(REF, SCALAR)
    def _wait(_: Any, counters: Any, program: Any) -> None:
        nothing = ir.Type.parse("!llvm.void")
        address = [address_of(counters, int_of(4 * counter)) for counter in (which, previous)]
        # Proxy fences order TMA accesses with other accesses.
        text = _BARRIER.format(fence="fence.proxy.async;" if copied else "")
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            llvm.inline_asm(nothing, [address[0]], text, "l", has_side_effects=True)
            with if_then(equal(program.registers.item(), int_of(0))):
                llvm.inline_asm(nothing, [address[1]], "st.relaxed.gpu.global.u32 [$0], 0;", "l", has_side_effects=True)
                scf.yield_([])
        utils.warpgroup_barrier()

    _wait(counters, program)


_BARRIER = f"""{{{{
    .reg .pred waiting;
    .reg .u32 here;
    {{fence}}
    red.release.gpu.global.add.u32 [$0], 1;
    again: ld.acquire.gpu.global.u32 here, [$0];
    setp.lt.u32 waiting, here, {PROGRAMS};
    @waiting bra again;
    {{fence}}
}}}}"""
