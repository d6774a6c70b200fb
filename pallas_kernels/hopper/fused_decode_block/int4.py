"""Matmuls with 4-bit weights in the Hopper kernel, with `wgmma`, in Mosaic's MLIR dialect.

`plan.py` defines the words. Here there are s = 8 parts, and a chunk has 256 inputs (8 groups) of every part. Rows of a
`wgmma` are (output, part), so that 64 rows are 8 outputs. Its columns are (sequence, part). Only products with equal
parts are used; `epilogue.add_diagonals` sums them. `pallas_mosaic_gpu.py` calls `take`, then `add`, for each chunk of a
block, and `joined` once per block.

A weight is `code * scale + minimum`, with one scale and minimum per group of 32 inputs. The codes alone are exact in
bfloat16. The matrix units multiply them, one group at a time, and the result is multiplied by the group's scale in
float32. What all codes of a group have in common, such as the minimum, is multiplied by the sum of the group's inputs.

Codes in shared memory have the layout of `GroupedMatrix`. Every output has 16 rows of bytes, with a byte for each of
the 64 groups of a chunk. A byte has inputs (members) m and m + 16 of its group. A `wgmma` adds 16 inputs: first those
of one group's low half-bytes, then those of its high half-bytes. The inputs therefore keep their order.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT, FragmentedArray, WGStridedFragLayout
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array

from .mlir_helpers import REF, float_of, inline, int_of, item, shared_address, sum_over, warp_and_lane, word
from .plan import BYTES, GROUPS, LINE, ROWS

OUTPUTS = ROWS * GROUPS // LINE
"""Outputs per 64 rows: 8, each with 8 parts."""

TILED = plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(LINE)
"""Layout of codes in shared memory. The swizzle interleaves the 16-byte pieces of eight rows, which reduces bank
conflicts.
"""

INPUTS = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
"""Layout of inputs in shared memory."""

OFFSET = 128.0
"""The bits of a code, or-ed with those of bfloat16 128, are the number 128 + code."""

CENTRE = 8.0
"""The code that represents zero in matrices without minima."""


def _words(count: int) -> Any:
    """Return the layout of an array with `count` words per thread."""
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=2)


def _read(address: Any, offset: int, kind: Any, count: int) -> Any:
    """Load `count` adjacent numbers from shared memory, at an address plus an offset in bytes."""
    pointer = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(address, int_of(offset)))
    registers = ir.VectorType.get((count,), kind)
    return llvm.load(registers, pointer, alignment=count * utils.bytewidth(kind))


def _f32x2(first: Any, second: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [first, second])


def take(codes: Any, factors: Any, tile: int) -> Array:
    """Load what a thread needs of a block's codes, scales and minima.

    Args:
        codes: codes of a slot in shared memory, uint8 [16 * outputs, 64].
        factors: scales and, if there are any, minima; float16 [1 or 2, outputs, 64].
        tile: index of the block in the slot.

    Returns:
        int32 words per thread: 16 of codes, 8 of the scales of all groups, and, per kind of factor (scale and minimum),
        2 for the groups whose sums the thread adds. Opaque; pass them to `add`.
    """
    kinds = factors.shape[0]
    count = 16 + 8 + 2 * kinds
    kind = plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=_words(count))

    @inline(plgpu.RefType(TILED), REF, returns=kind)
    def _take(_: Any, codes: Any, factors: Any) -> Any:
        warp, lane = warp_and_lane()
        part, across = arith.divui(lane, int_of(4)), arith.remui(lane, int_of(4))
        # Rows 16 warp + part and 16 warp + part + 8 are the same part of two outputs. A thread needs their members 2
        # across, 2 across + 1, and those plus 8.
        row = arith.addi(arith.muli(warp, int_of(2 * BYTES)), arith.muli(across, int_of(2)))
        place = arith.xori(arith.muli(part, int_of(GROUPS)), arith.muli(across, int_of(16)))
        start = arith.addi(shared_address(codes), arith.addi(arith.muli(row, int_of(LINE)), place))
        registers = [
            _read(start, (tile * OUTPUTS * BYTES + output * BYTES + member) * LINE, word(), 2)
            for output in range(2)
            for member in (0, 1, 8, 9)
        ]
        line = arith.addi(shared_address(factors), arith.muli(warp, int_of(2 * 2 * LINE)))
        whole = arith.addi(line, arith.muli(part, int_of(2 * GROUPS)))
        own_groups = arith.addi(whole, arith.muli(across, int_of(4)))
        rows = factors.type.shape[1]
        outputs = [2 * LINE * (tile * OUTPUTS + output) for output in range(2)]
        for output in outputs:
            four = _read(whole, output, word(), 4)
            registers += [vector.shuffle(four, four, [first, first + 1]) for first in (0, 2)]
        for which in range(kinds):
            two = [item(_read(own_groups, which * rows * 2 * LINE + output, word(), 1), 0) for output in outputs]
            registers.append(vector.from_elements(ir.VectorType.get((2,), word()), two))
        layout = WGStridedFragLayout((128 * count,), 2)
        return FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=True)

    return _take(codes, factors)


def add(words: Array, inputs: Any, sums: Any, total: Array, rest: Array) -> tuple[Array, Array]:
    """Add the products of a block of weights with a chunk of inputs to `total`.

    Args:
        words: what `take` returned.
        inputs: bfloat16 [N, 256] in shared memory, with N = 8 B rows (sequence, part).
        sums: sum of each group of inputs, float32 [8 N] in shared memory, eight groups per row of `inputs`.
        total: scaled sums of codes times inputs, float32 [64, N].
        rest: what the minima and `OFFSET` contribute. It has the layout of `total`, but a thread's two numbers are of
            two of a row's eight groups. Only `joined` may read it.

    Returns:
        The new `total` and `rest`.
    """
    columns, count = total.shape[1], words.shape[0] // 128
    blocks = columns // 8
    kind = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    layouts = plgpu.RefType(INPUTS), REF, plgpu.Layout.WGMMA, plgpu.Layout.WGMMA

    @inline(_words(count), *layouts, returns=(kind, kind))
    def _add(_: Any, words: Any, inputs: Any, sums: Any, total: Any, rest: Any) -> Any:
        unpacked = [item(register, place) for register in words.registers.flat for place in range(2)]
        codes, scales, factors = unpacked[:16], unpacked[16:24], unpacked[24:]
        totals = list(total.registers.flat)
        start = _descriptor(inputs)
        at_a_time = max(2 // blocks, 1)
        batches = [range(first, first + at_a_time) for first in range(0, GROUPS, at_a_time)]
        in_flight: list[Any] = []
        for batch in (*batches, None):
            if batch is not None:
                in_flight.append((batch, [_multiply(codes, start, group, columns) for group in batch]))
            if batch is None or len(in_flight) > 1:
                done, products = in_flight.pop(0)
                _wait_and_add(done, products, at_a_time if batch is not None else 0, scales, totals)
        rests = list(rest.registers.flat)
        _add_rest(factors, sums, rests, blocks)
        return _like(total, totals), _like(rest, rests)

    return _add(words, inputs, sums, total, rest)


def _like(array: Any, registers: list[Any]) -> Any:
    found = np.empty(array.registers.shape, dtype=object)
    for i, register in enumerate(registers):
        found.flat[i] = register
    return FragmentedArray(_registers=found, _layout=WGMMA_LAYOUT, _is_signed=None)


def _descriptor(inputs: Any) -> Any:
    """Return the `wgmma` descriptor of inputs in shared memory."""
    wide = ir.IntegerType.get_signless(64)

    def constant(value: int) -> Any:
        return arith.constant(wide, ir.IntegerAttr.get(wide, value))

    *_, tiles, rows, columns = inputs.type.shape
    start = arith.shrui(arith.andi(shared_address(inputs), int_of(0x3FFFF)), int_of(4))
    apart = tiles * rows * columns * 2  # stride between groups of eight rows, in bytes
    # The two highest bits select the swizzle of 128 bytes.
    high = arith.shli(constant(apart >> 4 | 1 << 30), constant(32))
    return arith.ori(arith.extui(wide, start), high)


def _multiply(codes: list[Any], start: Any, group: int, columns: int) -> list[Any]:
    """Issue the `wgmma`s of one group of every part, for codes + `OFFSET`. Their results are valid after a wait."""
    integer, wide = word(), ir.IntegerType.get_signless(64)
    # A word has the bytes of four groups. `prmt` joins the halves of two words that contain this group's bytes. After a
    # shift, `lop3` computes (x & 0x000f000f) | 0x43004300, which is two bfloat16 numbers 128 + code.
    of_group, byte = divmod(group, 4)
    pairs = []  # by eight members, then by output
    for members in range(2):
        for output in range(2):
            first, second = (codes[2 * (4 * output + 2 * members + i) + of_group] for i in range(2))
            chosen = int_of(0x5410 if byte < 2 else 0x7632)
            pairs.append(llvm.inline_asm(integer, [first, second, chosen], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))
    numbers = []
    for half in range(2):
        for pair in pairs:
            shift = 8 * (byte % 2) + 4 * half
            bits = arith.shrui(pair, int_of(shift)) if shift else pair
            numbers.append(llvm.inline_asm(integer, [bits], "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;", "=r,r"))
    descriptors = []
    for half in range(2):
        tile, step = divmod(2 * group + half, 4)
        offset = (tile * 1024 + step * 32) >> 4
        descriptors.append(arith.addi(start, arith.constant(wide, ir.IntegerAttr.get(wide, offset))))
    count = columns // 2
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    out = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    a = ["{" + ", ".join(f"${count + 4 * half + i}" for i in range(4)) + "}" for half in range(2)]
    text = f"""{{
        .reg .pred more;
        wgmma.fence.sync.aligned;
        setp.ne.b32 more, 0, 0;
        {name} {out}, {a[0]}, ${count + 8}, more, 1, 1, 0;
        setp.ne.b32 more, 1, 0;
        {name} {out}, {a[1]}, ${count + 9}, more, 1, 1, 0;
        wgmma.commit_group.sync.aligned;
    }}"""
    constraints = ",".join(["=f"] * count + ["r"] * 8 + ["l"] * 2)
    return _several(text, constraints, [*numbers, *descriptors], count)


def _several(text: str, constraints: str, arguments: list[Any], count: int) -> list[Any]:
    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * count)
    found: Any = llvm.inline_asm(kind, arguments, text, constraints, has_side_effects=True)
    return [llvm.extractvalue(f32, found, [i]) for i in range(count)]


def _wait_and_add(groups: Any, products: list[Any], pending: int, scales: list[Any], totals: list[Any]) -> None:
    """Wait until the `wgmma`s of at most `pending` groups are pending, then scale the products of `groups` and add them
    to `totals`.
    """
    flat = [number for group in products for number in group]
    count = len(flat)
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    flat = _several(f"wgmma.wait_group.sync.aligned {pending};", constraints, flat, count)
    each = count // len(products)
    for i, group in enumerate(groups):
        found = flat[i * each : (i + 1) * each]
        for output in range(2):
            pair = _halves(scales[4 * output + group // 2])
            scale = pair[group % 2]
            for block in range(each // 4):
                at, first = 2 * block + output, 4 * block + 2 * output
                totals[at] = vector.fma(_f32x2(*found[first : first + 2]), _f32x2(scale, scale), totals[at])


def _halves(word: Any) -> list[Any]:
    """Convert the two float16 values of a word to float32."""
    pair = utils.bitcast(word, ir.VectorType.get((2,), ir.F16Type.get()))
    return [arith.extf(ir.F32Type.get(), item(pair, place)) for place in range(2)]


def _add_rest(factors: list[Any], sums: Any, rests: list[Any], blocks: int) -> None:
    """Add the sums of inputs times their factors to `rests`: a thread's two of eight groups of one part, two outputs.

    The factor of a sum is the group's minimum, less its scale times `OFFSET`. Without minima it is the scale times
    -(`OFFSET` + `CENTRE`).
    """
    _, lane = warp_and_lane()
    start = arith.addi(shared_address(sums), arith.muli(lane, int_of(8)))
    inputs = [_read(start, 4 * 8 * GROUPS * block, ir.F32Type.get(), 2) for block in range(blocks)]
    of_code = float_of(-OFFSET if len(factors) > 2 else -OFFSET - CENTRE)
    for output in range(2):
        minima = _f32x2(*_halves(factors[2 + output])) if len(factors) > 2 else _f32x2(float_of(0.0), float_of(0.0))
        found = vector.fma(_f32x2(*_halves(factors[output])), _f32x2(of_code, of_code), minima)
        for block in range(blocks):
            at = 2 * block + output
            rests[at] = vector.fma(found, inputs[block], rests[at])


def joined(total: Array, rest: Array) -> Array:
    """Sum each row's `rest` over its four threads, and add it to all 8 columns of that sequence in `total`.

    Only the column of equal part is used later, so the other columns may be wrong.
    """
    kind = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @inline(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, returns=kind)
    def _join(_: Any, total: Any, rest: Any) -> Any:
        found = []
        for register, share in zip(total.registers.flat, rest.registers.flat, strict=True):
            more = sum_over(arith.addf(item(share, 0), item(share, 1)), [1, 2])
            found.append(arith.addf(register, _f32x2(more, more)))
        return _like(total, found)

    return _join(total, rest)
