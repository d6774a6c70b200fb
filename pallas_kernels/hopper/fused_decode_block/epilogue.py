"""Steps of the Hopper kernel after each matmul, by individual threads, in Mosaic's MLIR dialect.

`plan.py` defines the words. `pallas_mosaic_gpu.py` calls `add_diagonals` for the products of each block.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf
from jaxtyping import Array

from ..wgmma import load_all
from .int8 import row_of
from .mlir_helpers import REF, SCALAR, equal, float_of, if_then, indices, inline, int_of, item, sum_over, warp_and_lane
from .plan import HALF, PROGRAMS


def load(ref: Any, layout: Any) -> Array:
    """Load a whole array from shared memory, in the given layout."""
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
    """Write a block's outputs. Each is the sum of the diagonal of s by s products; see `plan.py`.

    Args:
        products: products of the block, [64, B s], with rows (output, part) and columns (sequence, part).
        out: shared memory, [8, columns], or [2, 8, columns] if each half of the products has its own array.
        column: column of the first half's outputs.
        parts: s.
        second: offset of the second half's column; unused if that half has its own array.
        scale: factors [8], one per sequence, in shared memory.
        scales: factors of outputs, for each column of `out`, [columns] or [2, columns], in shared memory. They are
            given for int8 weights; the rows of the products are then in the order of `row_of`.
    """
    blocks, apart = products.shape[1] // 8, len(out.shape) == 3
    of_rows, of_outputs = scale is not None, scales is not None
    factors = [ref for ref in (scale, scales) if ref is not None]

    @inline(plgpu.Layout.WGMMA, SCALAR, *(REF for _ in (out, *factors)))
    def _write(_: Any, products: Any, column: Any, out: Any, *factors: Any) -> None:
        warp, lane = warp_and_lane()
        down, across = arith.divui(lane, int_of(4)), arith.muli(arith.remui(lane, int_of(4)), int_of(2))
        bits = [bit for i, bit in enumerate((8, 16, 4) if of_outputs else (4, 8, 16)) if 2**i < parts]
        bits += [bit for bit in (1, 2) if 2 * bit < parts]
        down = row_of(down) if of_outputs else down
        # A lane has products (16 warp + down + 8 half, 8 block + across) and its right neighbour.
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
            sequence, which = arith.divui(first, int_of(parts)), arith.divui(row, int_of(HALF))
            at = arith.addi(column.registers.item(), arith.divui(arith.remui(row, int_of(HALF)), int_of(parts)))
            if not apart:
                at = arith.addi(at, arith.muli(which, int_of(second)))
            one = arith.andi(equal(part, int_of(0)), equal(arith.remui(first, int_of(parts)), int_of(0)))
            array = (which,) if apart else ()
            with if_then(one):
                if of_rows:
                    total = arith.mulf(total, memref.load(factors[0], indices(sequence)))
                if of_outputs:
                    total = arith.mulf(total, memref.load(factors[-1], indices(*array, at)))
                memref.store(total, out, indices(*array, sequence, at))
                scf.yield_([])

    _write(products, column, out, *factors)


def inverse_roots(squares: Any, out: Any, *, depth: int, eps: float) -> None:
    """Compute 1 / sqrt(mean square + eps) of each sequence from all programs' sums of squares [programs, 8].

    Both arrays are in shared memory.
    """

    @inline(REF, REF)
    def _write(_: Any, squares: Any, out: Any) -> None:
        warp, lane = warp_and_lane()
        for i in range(2):
            sequence = arith.addi(arith.muli(warp, int_of(2)), int_of(i))
            total = float_of(0.0)
            for first in range(0, PROGRAMS, 32):
                total = arith.addf(total, memref.load(squares, indices(arith.addi(lane, int_of(first)), sequence)))
            mean = arith.mulf(sum_over(total, [1, 2, 4, 8, 16]), float_of(1 / depth))
            f32 = ir.F32Type.get()
            root: Any = llvm.inline_asm(f32, [arith.addf(mean, float_of(eps))], "rsqrt.approx.f32 $0, $1;", "=f,f")
            with if_then(equal(lane, int_of(0))):
                memref.store(root, out, indices(sequence))
                scf.yield_([])
        utils.warpgroup_barrier()

    _write(squares, out)
