"""Steps of the Hopper kernel that threads take by themselves, in Mosaic's dialect."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxtyping import Array

from ..wgmma import load_all
from .plan import HALF, PROGRAMS

REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())


def load(ref: Any, layout: Any) -> Array:
    """All of an array in shared memory, in a layout."""
    return load_all(plgpu, ref, layout)


def _inline(*types: Any, returns: Any = None) -> Callable[[Any], Any]:
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)


def _int(value: int) -> Any:
    kind = ir.IntegerType.get_signless(32)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _float(value: float) -> Any:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def _at(*places: Any) -> list[Any]:
    return [arith.index_cast(ir.IndexType.get(), _int(at) if isinstance(at, int) else at) for at in places]


def _equal(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _below(a: Any, b: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, a, _int(b))


def _item(vector_register: Any, place: int) -> Any:
    return vector.extract(vector_register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def _where(condition: Any) -> Any:
    """The inside of a branch; it ends with `scf.yield_([])`."""
    return ir.InsertionPoint(scf.IfOp(condition).then_block)


def _warp_and_lane() -> tuple[Any, Any]:
    thread = arith.remui(utils.thread_idx(), _int(128))
    return arith.divui(thread, _int(32)), arith.remui(thread, _int(32))


def _sum(value: Any, distances: list[int]) -> Any:
    """Over the lanes that differ in these bits."""
    for distance in distances:
        value = arith.addf(value, utils.shfl_bfly(value, distance))
    return value


def sync() -> None:
    """Wait for the other threads of the warpgroup."""

    @_inline()
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

    @_inline(plgpu.Layout.WGMMA, SCALAR, *(REF for _ in (out, *factors)))
    def _write(_: Any, products: Any, column: Any, out: Any, *factors: Any) -> None:
        warp, lane = _warp_and_lane()
        down, across = arith.divui(lane, _int(4)), arith.muli(arith.remui(lane, _int(4)), _int(2))
        bits = [bit for bit in (4, 8, 16) if bit < 4 * parts] + [bit for bit in (1, 2) if 2 * bit < parts]
        # A lane has products (16 warp + down + 8 half, 8 block + across) and the one beside.
        for i, register in enumerate(products.registers.flat):
            block, half = divmod(i, 2)
            assert block < blocks
            row = arith.addi(arith.muli(warp, _int(16)), arith.addi(down, _int(8 * half)))
            first = arith.addi(across, _int(8 * block))
            part = arith.remui(row, _int(parts))
            total = _float(0.0)
            for place in range(2):
                on = _equal(arith.remui(arith.addi(first, _int(place)), _int(parts)), part)
                total = arith.addf(total, arith.select(on, _item(register, place), _float(0.0)))
            total = _sum(total, bits)
            token, which = arith.divui(first, _int(parts)), arith.divui(row, _int(HALF))
            at = arith.addi(column.registers.item(), arith.divui(arith.remui(row, _int(HALF)), _int(parts)))
            if not apart:
                at = arith.addi(at, arith.muli(which, _int(second)))
            one = arith.andi(_equal(part, _int(0)), _equal(arith.remui(first, _int(parts)), _int(0)))
            array = (which,) if apart else ()
            with _where(one):
                if of_rows:
                    total = arith.mulf(total, memref.load(factors[0], _at(token)))
                if of_outputs:
                    total = arith.mulf(total, memref.load(factors[-1], _at(*array, at)))
                memref.store(total, out, _at(*array, token, at))
                scf.yield_([])

    _write(products, column, out, *factors)


def sum_rows(x: Array, out: Any) -> None:
    """Sums of rows of x [8, 64], of which 16 threads have one, into shared memory [8]."""

    @_inline(plgpu.Layout.WG_STRIDED((8, 64), vec_size=4), REF)
    def _write(_: Any, x: Any, out: Any) -> None:
        warp, lane = _warp_and_lane()
        total = _float(0.0)
        for register in x.registers.flat:
            for place in range(4):
                total = arith.addf(total, _item(register, place))
        total = _sum(total, [1, 2, 4, 8])
        with _where(_equal(arith.remui(lane, _int(16)), _int(0))):
            memref.store(total, out, _at(arith.addi(arith.muli(warp, _int(2)), arith.divui(lane, _int(16)))))
            scf.yield_([])

    _write(x, out)


def inverse_roots(squares: Any, out: Any, *, depth: int, eps: float) -> None:
    """1 / sqrt(mean square + eps) of each row, from every program's sums of squares [programs, 8]; both in shared memory."""

    @_inline(REF, REF)
    def _write(_: Any, squares: Any, out: Any) -> None:
        warp, lane = _warp_and_lane()
        for i in range(2):
            row = arith.addi(arith.muli(warp, _int(2)), _int(i))
            total = _float(0.0)
            for first in range(0, PROGRAMS, 32):
                total = arith.addf(total, memref.load(squares, _at(arith.addi(lane, _int(first)), row)))
            mean = arith.mulf(_sum(total, [1, 2, 4, 8, 16]), _float(1 / depth))
            f32 = ir.F32Type.get()
            root: Any = llvm.inline_asm(f32, [arith.addf(mean, _float(eps))], "rsqrt.approx.f32 $0, $1;", "=f,f")
            with _where(_equal(lane, _int(0))):
                memref.store(root, out, _at(row))
                scf.yield_([])
        utils.warpgroup_barrier()

    _write(squares, out)


def bring(source: Any, out: Any, first: Array, *, count: int) -> None:
    """Columns [first, first + count) of an array in global memory, [B, _] or one row for all, into shared memory [8, 64]."""
    rows = source.shape[0] if len(source.shape) == 2 else None

    @_inline(REF, REF, SCALAR)
    def _copy(_: Any, source: Any, out: Any, first: Any) -> None:
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.muli(warp, _int(2)), arith.divui(lane, _int(16)))
        for place in range(4):
            column = arith.addi(arith.muli(arith.remui(lane, _int(16)), _int(4)), _int(place))
            there = _below(column, count)
            with _where(there if rows is None else arith.andi(there, _below(row, rows))):
                at = arith.addi(first.registers.item(), column)
                value = memref.load(source, _at(at) if rows is None else _at(row, at))
                memref.store(value, out, _at(row, column))
                scf.yield_([])

    _copy(source, out, first)


def as_bfloat16(levels: Array) -> Array:
    """Levels of int8 [64, k], four beside each other to a thread, as the matrix units take bfloat16, two and two.

    That is `layout_cast(levels, WGMMA).astype(bfloat16)` in ten instead of 17 instructions for four levels: threads exchange levels before
    they are twice as long, and two of them are put apart while they are chosen from what a thread has and what it has been given.
    """
    kind = plgpu.ShapeDtypeStruct(levels.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @_inline(plgpu.Layout.WGMMA_UPCAST_2X, returns=kind)
    def _convert(_: Any, levels: Any) -> Any:
        integer = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        both = llvm.StructType.get_literal([integer, integer])
        even = _equal(arith.remui(utils.thread_idx(), _int(2)), _int(0))
        # Of a row's 16 levels, an even thread has 0 to 3 and the next one 8 to 11; the one multiplies 0, 1, 8 and 9, the other the rest.
        chosen = [arith.select(even, _int(mine), _int(given)) for mine, given in ((0x0100, 0x0706), (0x0504, 0x0302))]
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

    @_inline(REF, REF, SCALAR)
    def _copy(_: Any, source: Any, out: Any, first: Any) -> None:
        thread = arith.remui(utils.thread_idx(), _int(128))
        for start in range(0, count, 128):
            column = arith.addi(thread, _int(start))
            with _where(_below(column, count)):
                value = memref.load(source, _at(arith.addi(first.registers.item(), column)))
                memref.store(value, out, _at(column))
                scf.yield_([])

    _copy(source, out, first)


def meet(counters: Any, which: int, free: int, program: Array) -> None:
    """Wait until every program is here, and what each has written is there for all to read.

    Args:
        counters: of global memory, three or more, all zero before the first call.
        which: the counter that counts this time.
        free: the counter that was waited at the time before, which is zero again after this.
    """

    @_inline(REF, SCALAR)
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
            with _where(_equal(program.registers.item(), _int(0))):
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
