"""Matmuls with int8 weights in the Hopper kernel, in Mosaic's MLIR dialect. `plan.py` defines the words.

`pallas_mosaic_gpu.py` calls `load_codes`, then `multiply_codes`, for each chunk of a block.

The matrix units cannot multiply int8 by bfloat16. Codes are converted to bfloat16 in registers and multiplied from
there by each warp (`mma.sync`). No thread waits for another warp, and threads exchange nothing.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array

from .mlir_helpers import float_of, inline, int_of, item, warp_and_lane
from .plan import ROWS

DIVISOR = 64.0
"""Codes are divided by this before they are multiplied. Scales are multiplied by it."""


def row_of(down: Any) -> Any:
    """Return which of eight rows of codes row `down` of the products belongs to: 0, 4, 1, 5 and so on.

    With the swizzle of shared memory, 64 codes of two consecutive rows of this order are in different banks.
    """
    return arith.ori(arith.divui(down, int_of(2)), arith.muli(arith.remui(down, int_of(2)), int_of(4)))


def _further(pointer: Any, offset: Any) -> Any:
    """Return a pointer plus an offset in bytes, which can be a value or a constant."""
    byte, unknown = ir.IntegerType.get_signless(8), -(2**31)
    known, offsets = (offset, []) if isinstance(offset, int) else (unknown, [offset])
    return llvm.getelementptr(pointer.type, pointer, offsets, [known], byte, llvm.GEPNoWrapFlags.none)


def _four(pointer: Any, offset: int) -> Any:
    """Load four words from shared memory, at a pointer plus an offset in bytes."""
    kind = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    return llvm.load(kind, _further(pointer, offset), alignment=16)


def load_codes(ref: Any, transforms: Any) -> Array:
    """Load int8 codes [64, k] from shared memory, four per word, as `multiply_codes` expects them.

    A thread loads 16 codes at once, and multiplies codes that it loaded. The 16 inputs that one `mma` adds can be any,
    provided that codes and inputs have the same order. Threads therefore need not exchange codes.
    """
    depth = ref.shape[-1]
    layout = plgpu.Layout.WG_STRIDED((ROWS, depth // 4), vec_size=4)
    kind = plgpu.ShapeDtypeStruct((ROWS, depth // 4), jnp.int32, layout=layout)

    @inline(plgpu.RefType(transforms), returns=kind)
    def _load(_: Any, ref: Any) -> Any:
        warp, lane = warp_and_lane()
        row, quarter = row_of(arith.divui(lane, int_of(4))), arith.remui(lane, int_of(4))
        # Tiles have 8 rows and 128 columns. The 16-byte pieces of their rows are swizzled.
        eight = 1024 * (depth // 128)
        start = arith.addi(arith.muli(warp, int_of(2 * eight)), arith.muli(row, int_of(128)))
        place = arith.muli(arith.xori(quarter, row), int_of(16))
        offsets = [arith.addi(start, arith.xori(place, int_of(64 * i))) for i in range(2)]
        pointers = [_further(utils.memref_ptr(ref), offset) for offset in offsets]
        registers = np.empty((depth // 32,), dtype=object)
        for block in range(depth // 64):
            for half in range(2):
                registers[2 * block + half] = _four(pointers[block % 2], half * eight + block // 2 * 1024)
        return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return _load(ref)


def multiply_codes(total: Array, codes: Array, inputs: Any, transforms: Any) -> Array:
    """Return `total` [64, n] plus the products of codes with inputs [n, k] in shared memory.

    Codes come from `load_codes` and are divided by `DIVISOR`. Every 8 rows are in the order of `row_of`. Both operands
    of the `mma` are in registers. Warps do not wait for each other, so that the assembler can interleave loads,
    conversions and multiplications.
    """
    columns, depth = inputs.shape
    layout = plgpu.Layout.WG_STRIDED((ROWS, depth // 4), vec_size=4)
    kind = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA)
    blocks = columns // 8
    chains = max(4 // blocks, 1)  # independent accumulators, to overlap dependent additions

    @inline(plgpu.Layout.WGMMA, layout, plgpu.RefType(transforms), returns=kind)
    def _multiply(_: Any, total: Any, codes: Any, inputs: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        _, lane = warp_and_lane()
        row, quarter = arith.divui(lane, int_of(4)), arith.remui(lane, int_of(4))
        start = arith.muli(row, int_of(128))
        place = arith.muli(arith.xori(arith.muli(quarter, int_of(2)), row), int_of(16))
        offsets = [arith.addi(start, arith.xori(place, int_of(16 * i))) for i in range(2)]
        pointers = [_further(utils.memref_ptr(inputs), offset) for offset in offsets]
        sums = [[[float_of(0.0)] * 4 for _ in range(blocks)] for _ in range(chains)]
        for i, register in enumerate(total.registers.flat):
            sums[0][i // 2][2 * (i % 2)] = item(register, 0)
            sums[0][i // 2][2 * (i % 2) + 1] = item(register, 1)
        two = llvm.StructType.get_literal([i32] * 2)
        four = llvm.StructType.get_literal([f32] * 4)
        for tile in range(depth // 64):  # 64 inputs
            numbers = []
            for block in range(blocks):
                at = 1024 * (block * (depth // 64) + tile)
                words = [_four(pointer, at) for pointer in pointers]
                numbers.append([item(word, i) for word in words for i in range(4)])
            for step in range(4):
                halves = []
                for half in range(2):
                    word = item(codes.registers[2 * tile + half], step)
                    pairs: Any = llvm.inline_asm(two, [word], _CONVERT, "=r,=r,r")
                    halves.append([llvm.extractvalue(i32, pairs, [i]) for i in range(2)])
                first = [halves[half][i] for i in range(2) for half in range(2)]
                for block in range(blocks):
                    before = sums[step % chains][block]
                    operands = [*first, *numbers[block][2 * step : 2 * step + 2], *before]
                    after: Any = llvm.inline_asm(four, operands, _MULTIPLY, _MULTIPLIED, has_side_effects=True)
                    sums[step % chains][block] = [llvm.extractvalue(f32, after, [i]) for i in range(4)]
        registers = np.empty(WGMMA_LAYOUT.registers_shape((ROWS, columns)), dtype=object)
        pair = ir.VectorType.get((2,), f32)
        for i in range(registers.size):
            added = [float_of(0.0)] * 2
            for place in range(2):
                terms = [chain[i // 2][2 * (i % 2) + place] for chain in sums]
                while len(terms) > 1:
                    terms = [arith.addf(*terms[j : j + 2]) for j in range(0, len(terms), 2)]
                added[place] = terms[0]
            registers.flat[i] = vector.from_elements(pair, added)
        return FragmentedArray(_registers=registers, _layout=WGMMA_LAYOUT, _is_signed=None)

    return _multiply(total, codes, inputs)


_CONVERT = """{
    .reg .b32 above, low, high, scale, less;
    mov.b32 scale, 0x7f007f00;
    mov.b32 less, 0xc000c000;
    xor.b32 above, $2, 0x80808080;
    prmt.b32 low, above, 0, 0x4140;
    prmt.b32 high, above, 0, 0x4342;
    fma.rn.bf16x2 $0, low, scale, less;
    fma.rn.bf16x2 $1, high, scale, less;
}"""
"""Convert four codes to two pairs of bfloat16 values, divided by `DIVISOR`.

A bfloat16 value with only its eight lowest bits set is the number in these bits times 2^-133, subnormal or not. Here
the number is code + 128. Times 2^127, minus 2, this is exactly code / 64.
"""

_MULTIPLY = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""

_MULTIPLIED = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
