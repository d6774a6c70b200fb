"""Products with levels of int8, as threads of the Hopper kernel take them, in Mosaic's dialect.

The matrix units do not multiply int8 by bfloat16. Levels become bfloat16 in registers, from where the units take them, warp by warp
(`mma.sync`): no thread waits for one of another warp, and nothing is exchanged between threads.
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

from .plan import ROWS
from .threads import float_of, inline, int_of, item, warp_and_lane

LEVELS = 64.0
"""Levels are multiplied divided by this, which scales make up for."""


def row_of(down: Any) -> Any:
    """Which of eight rows of levels the lanes of one row of a product have: 0, 4, 1, 5 and so on.

    In shared memory rows lie interleaved such that 64 levels of these two, one after the other, are in different banks.
    """
    return arith.ori(arith.divui(down, int_of(2)), arith.muli(arith.remui(down, int_of(2)), int_of(4)))


def _further(pointer: Any, offset: Any) -> Any:
    """A pointer so many bytes further on, a number of the program's or one known here."""
    byte, unknown = ir.IntegerType.get_signless(8), -(2**31)
    known, offsets = (offset, []) if isinstance(offset, int) else (unknown, [offset])
    return llvm.getelementptr(pointer.type, pointer, offsets, [known], byte, llvm.GEPNoWrapFlags.none)


def _four(pointer: Any, offset: int) -> Any:
    """Four words of shared memory, so many bytes further on."""
    kind = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
    return llvm.load(kind, _further(pointer, offset), alignment=16)


def load_levels(ref: Any, transforms: Any) -> Array:
    """Levels of int8 [64, k] in shared memory, four to a number, as `multiply_levels` takes them.

    A thread loads 16 levels at once. Which 16 inputs a product of the matrix units adds up is all the same, if it is the same ones of levels
    and inputs: so nothing is exchanged between threads.
    """
    depth = ref.shape[-1]
    layout = plgpu.Layout.WG_STRIDED((ROWS, depth // 4), vec_size=4)
    kind = plgpu.ShapeDtypeStruct((ROWS, depth // 4), jnp.int32, layout=layout)

    @inline(plgpu.RefType(transforms), returns=kind)
    def _load(_: Any, ref: Any) -> Any:
        warp, lane = warp_and_lane()
        row, quarter = row_of(arith.divui(lane, int_of(4))), arith.remui(lane, int_of(4))
        # Tiles of 8 rows and 128 columns, in whose rows 16 bytes at a time are interleaved.
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


def multiply_levels(total: Array, levels: Array, inputs: Any, transforms: Any) -> Array:
    """`total` [64, n] and the products of levels, as `load_levels` returns them, with inputs [n, k] in shared memory.

    Levels are 1 / `LEVELS` of what they are. Rows of each 8 are in the order of `row_of`. The matrix units take both from registers here, warp by
    warp, which waits for nobody and leaves it to the assembler to load, convert and multiply side by side.
    """
    columns, depth = inputs.shape
    layout = plgpu.Layout.WG_STRIDED((ROWS, depth // 4), vec_size=4)
    kind = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA)
    blocks = columns // 8
    chains = max(4 // blocks, 1)  # sums that wait for one another: several at a time

    @inline(plgpu.Layout.WGMMA, layout, plgpu.RefType(transforms), returns=kind)
    def _multiply(_: Any, total: Any, levels: Any, inputs: Any) -> Any:
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
        for part in range(depth // 64):
            numbers = []
            for block in range(blocks):
                at = 1024 * (block * (depth // 64) + part)
                words = [_four(pointer, at) for pointer in pointers]
                numbers.append([item(word, i) for word in words for i in range(4)])
            for step in range(4):
                halves = []
                for half in range(2):
                    word = item(levels.registers[2 * part + half], step)
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

    return _multiply(total, levels, inputs)


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
"""Four levels, two and two, divided by `LEVELS`. The eight lowest bits of a bfloat16 whose others are zero are a number times 2^-133, subnormal
or not: here the level and 128. Times 2^127, less 2, that is the level / 64, and exact.
"""

_MULTIPLY = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""

_MULTIPLIED = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
