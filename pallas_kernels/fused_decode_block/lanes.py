"""Steps of the Hopper kernel that threads take by themselves, in Mosaic's dialect."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf
from jaxtyping import Array

from ..wgmma import load_all
from .plan import HALF, PROGRAMS
from .threads import REF, SCALAR, below, equal, float_of, inline, int_of, item, places, sum_over, warp_and_lane, where


def load(ref: Any, layout: Any) -> Array:
    """All of an array in shared memory, in a layout."""
    return load_all(plgpu, ref, layout)


def sync() -> None:
    """Wait for the other threads of the warpgroup."""

    @inline()
    def _wait(_: Any) -> None:
        utils.warpgroup_barrier()

    _wait()


def add_diagonals(
    products: Array, out: Any, column: Array, *, parts: int, second: int, scale: Any = None, scales: Any = None
) -> None:
    """Write outputs, each the sum of the diagonal of a block [s, s] of products [64, B s].

    Args:
        out: shared memory, [8, columns], or [2, 8, columns] where the products' halves go into one array each.
        column: where the outputs of the first half go.
        parts: s.
        second: where those of the second half go, from there; not asked for if they have an array of their own.
        scale: factors [8], one per row of inputs, in shared memory.
        scales: factors of outputs, for each column of `out`, [columns] or [2, columns], in shared memory.
    """
    blocks, apart = products.shape[1] // 8, len(out.shape) == 3
    of_rows, of_outputs = scale is not None, scales is not None
    factors = [ref for ref in (scale, scales) if ref is not None]

    @inline(plgpu.Layout.WGMMA, SCALAR, *(REF for _ in (out, *factors)))
    def _write(_: Any, products: Any, column: Any, out: Any, *factors: Any) -> None:
        warp, lane = warp_and_lane()
        down, across = arith.divui(lane, int_of(4)), arith.muli(arith.remui(lane, int_of(4)), int_of(2))
        bits = [bit for bit in (4, 8, 16) if bit < 4 * parts] + [bit for bit in (1, 2) if 2 * bit < parts]
        # A lane has products (16 warp + down + 8 half, 8 block + across) and the one beside.
        for i, register in enumerate(products.registers.flat):
            block, half = divmod(i, 2)
            assert block < blocks
            row = arith.addi(arith.muli(warp, int_of(16)), arith.addi(down, int_of(8 * half)))
            first = arith.addi(across, int_of(8 * block))
            part = arith.remui(row, int_of(parts))
            total = float_of(0.0)
            for place in range(2):
                on = equal(arith.remui(arith.addi(first, int_of(place)), int_of(parts)), part)
                total = arith.addf(total, arith.select(on, item(register, place), float_of(0.0)))
            total = sum_over(total, bits)
            token, which = arith.divui(first, int_of(parts)), arith.divui(row, int_of(HALF))
            at = arith.addi(column.registers.item(), arith.divui(arith.remui(row, int_of(HALF)), int_of(parts)))
            if not apart:
                at = arith.addi(at, arith.muli(which, int_of(second)))
            one = arith.andi(equal(part, int_of(0)), equal(arith.remui(first, int_of(parts)), int_of(0)))
            array = (which,) if apart else ()
            with where(one):
                if of_rows:
                    total = arith.mulf(total, memref.load(factors[0], places(token)))
                if of_outputs:
                    total = arith.mulf(total, memref.load(factors[-1], places(*array, at)))
                memref.store(total, out, places(*array, token, at))
                scf.yield_([])

    _write(products, column, out, *factors)


def sum_rows(x: Array, out: Any) -> None:
    """Sums of rows of x [8, 64], of which 16 threads have one, into shared memory [8]."""

    @inline(plgpu.Layout.WG_STRIDED((8, 64), vec_size=4), REF)
    def _write(_: Any, x: Any, out: Any) -> None:
        warp, lane = warp_and_lane()
        total = float_of(0.0)
        for register in x.registers.flat:
            for place in range(4):
                total = arith.addf(total, item(register, place))
        total = sum_over(total, [1, 2, 4, 8])
        with where(equal(arith.remui(lane, int_of(16)), int_of(0))):
            memref.store(total, out, places(arith.addi(arith.muli(warp, int_of(2)), arith.divui(lane, int_of(16)))))
            scf.yield_([])

    _write(x, out)


def inverse_roots(squares: Any, out: Any, *, depth: int, eps: float) -> None:
    """1 / sqrt(mean square + eps) of each row, from every program's sums of squares [programs, 8]; both in shared memory."""

    @inline(REF, REF)
    def _write(_: Any, squares: Any, out: Any) -> None:
        warp, lane = warp_and_lane()
        for i in range(2):
            row = arith.addi(arith.muli(warp, int_of(2)), int_of(i))
            total = float_of(0.0)
            for first in range(0, PROGRAMS, 32):
                total = arith.addf(total, memref.load(squares, places(arith.addi(lane, int_of(first)), row)))
            mean = arith.mulf(sum_over(total, [1, 2, 4, 8, 16]), float_of(1 / depth))
            f32 = ir.F32Type.get()
            root: Any = llvm.inline_asm(f32, [arith.addf(mean, float_of(eps))], "rsqrt.approx.f32 $0, $1;", "=f,f")
            with where(equal(lane, int_of(0))):
                memref.store(root, out, places(row))
                scf.yield_([])
        utils.warpgroup_barrier()

    _write(squares, out)


def bring(source: Any, out: Any, first: Array, *, count: int) -> None:
    """Columns [first, first + count) of an array in global memory, [B, _] or one row for all, into shared memory [8, 64]."""
    rows = source.shape[0] if len(source.shape) == 2 else None

    @inline(REF, REF, SCALAR)
    def _copy(_: Any, source: Any, out: Any, first: Any) -> None:
        warp, lane = warp_and_lane()
        row = arith.addi(arith.muli(warp, int_of(2)), arith.divui(lane, int_of(16)))
        for place in range(4):
            column = arith.addi(arith.muli(arith.remui(lane, int_of(16)), int_of(4)), int_of(place))
            there = below(column, count)
            with where(there if rows is None else arith.andi(there, below(row, rows))):
                at = arith.addi(first.registers.item(), column)
                value = memref.load(source, places(at) if rows is None else places(row, at))
                memref.store(value, out, places(row, column))
                scf.yield_([])

    _copy(source, out, first)


def as_bfloat16(levels: Array) -> Array:
    """Levels of int8 [64, k], four beside each other to a thread, as the matrix units take bfloat16, two and two.

    That is `layout_cast(levels, WGMMA).astype(bfloat16)` in ten instead of 17 instructions for four levels: threads exchange levels before
    they are twice as long, and two of them are put apart while they are chosen from what a thread has and what it has been given.
    """
    kind = plgpu.ShapeDtypeStruct(levels.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @inline(plgpu.Layout.WGMMA_UPCAST_2X, returns=kind)
    def _convert(_: Any, levels: Any) -> Any:
        integer = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([integer, integer])
        even = equal(arith.remui(utils.thread_idx(), int_of(2)), int_of(0))
        # Of a row's 16 levels, an even thread has 0 to 3 and the next one 8 to 11; the one multiplies 0, 1, 8 and 9, the other the rest.
        chosen = [
            arith.select(even, int_of(mine), int_of(given)) for mine, given in ((0x0100, 0x0706), (0x0504, 0x0302))
        ]
        registers = np.empty(WGMMA_LAYOUT.registers_shape(levels.shape), dtype=object)
        for place, register in np.ndenumerate(levels.registers):
            held = utils.bitcast(register, integer)
            pairs: Any = llvm.inline_asm(both, [held, utils.shfl_bfly(held, 1), *chosen], _CONVERT, "=r,=r,r,r,r,r")
            for half in range(2):
                numbers = utils.bitcast(llvm.extractvalue(integer, pairs, [half]), pair)
                registers[(place[0], 2 * place[1] + half, *place[2:-1])] = numbers
        return FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return _convert(levels)


_CONVERT = """{
    .reg .b32 low, high, more, less;
    prmt.b32 low, $2, $3, $4;
    prmt.b32 high, $2, $3, $5;
    lop3.b32 more, low, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, low, 0x00800080, 0x43004300, 0xea;
    sub.bf16x2 $0, more, less;
    lop3.b32 more, high, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, high, 0x00800080, 0x43004300, 0xea;
    sub.bf16x2 $1, more, less;
}"""
"""Two levels to each half, and their values: 128 and the seven low bits, less 128 or, where the highest bit is set, 256."""


def bring_scales(source: Any, out: Any, first: Array, *, count: int) -> None:
    """Numbers [first, first + count) of an array [_] in global memory, into the first of one in shared memory [columns]."""

    @inline(REF, REF, SCALAR)
    def _copy(_: Any, source: Any, out: Any, first: Any) -> None:
        thread = arith.remui(utils.thread_idx(), int_of(128))
        for start in range(0, count, 128):
            column = arith.addi(thread, int_of(start))
            with where(below(column, count)):
                value = memref.load(source, places(arith.addi(first.registers.item(), column)))
                memref.store(value, out, places(column))
                scf.yield_([])

    _copy(source, out, first)


def meet(counters: Any, which: int, free: int, program: Array) -> None:
    """Wait until every program is here, and what each has written is there for all to read.

    Args:
        counters: of global memory, three or more, all zero before the first call.
        which: the counter that counts this time.
        free: the counter that was waited at the time before, which is zero again after this.
    """

    @inline(REF, SCALAR)
    def _wait(_: Any, counters: Any, program: Any) -> None:
        wide, nothing = ir.IntegerType.get_signless(64), ir.Type.parse("!llvm.void")
        start = llvm.ptrtoint(wide, utils.memref_ptr(counters))
        address = [
            arith.addi(start, arith.constant(wide, ir.IntegerAttr.get(wide, 4 * counter))) for counter in (which, free)
        ]
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            # The copy engine wrote and will read: its accesses are ordered with these by the proxy fences.
            llvm.inline_asm(nothing, [address[0]], _MEET, "l", has_side_effects=True)
            with where(equal(program.registers.item(), int_of(0))):
                llvm.inline_asm(nothing, [address[1]], "st.relaxed.gpu.global.u32 [$0], 0;", "l", has_side_effects=True)
                scf.yield_([])
        utils.warpgroup_barrier()

    _wait(counters, program)


_MEET = f"""{{
    .reg .pred waiting;
    .reg .u32 here;
    fence.proxy.async;
    red.release.gpu.global.add.u32 [$0], 1;
    again: ld.acquire.gpu.global.u32 here, [$0];
    setp.lt.u32 waiting, here, {PROGRAMS};
    @waiting bra again;
    fence.proxy.async;
}}"""
