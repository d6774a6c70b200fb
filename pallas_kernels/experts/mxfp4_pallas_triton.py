"""Products with rows of MXFP4 matrices inside the Triton kernels for few pairs. They only read the codes and scales.

A matrix has its codes by members of groups: the 16 bytes of a group are as far apart as there are groups. A step of the
loop reads some members of all groups, which are adjacent. The next step reads other members of the same groups, so that
each thread keeps its scales in registers. Columns whose number is no power of two are cut into spans. The last span is
masked.

Codes are placed where exponent and fraction of a float begin, from the right. This gives e2m1 numbers times a constant
power of two, also where their exponent is zero, since floats without an exponent are subnormal. A factor makes them
weights, and the matrix units multiply.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt8

from ..projection.quantized import GroupedMatrix
from ..triton import backend, dividing_block

SPAN = 128
"""Maximum number of columns that are multiplied at a time."""

LEAST = 16
"""Minimum number of columns that the matrix units multiply."""

LOWERED = 32
"""Weights are divided by 2^LOWERED, and sums multiplied by it, as the factors of large ones would not be finite otherwise."""


class Codes(NamedTuple):
    """An MXFP4 matrix as the kernels read it. O outputs, G groups of 32 inputs.

    Attributes:
        levels: two codes a byte [O, 16G], members of groups first.
        scale: exponents [O, G].
    """

    levels: UInt8[Array, "O half"]
    scale: UInt8[Array, "O G"]


def codes_of(matrix: GroupedMatrix) -> Codes:
    """Return the arrays of a matrix, whose bytes stay as they are."""
    return Codes(matrix.levels.reshape(len(matrix.levels), -1), matrix.scale)


def spans(width: int) -> list[tuple[int, int]]:
    """Return the first column of each span, and its size, a power of two. Fewer than 64 columns are padded."""
    found, start = [], 0
    while start < width:
        rest = width - start
        size = min(SPAN, 1 << rest.bit_length() - 1) if rest >= 64 else max(LEAST, pl.next_power_of_2(rest))
        found.append((start, size))
        start += size
    return found


def member_order(inputs: Int[Array, "*I"], groups: int) -> Int[Array, "*I"]:
    """Return the places of inputs in the order in which matrices are multiplied, that of `in_order_of`."""
    return inputs % 32 * groups + inputs // 32


def products(
    matrices: Sequence[Codes],
    rows: Callable[[Int[Array, "_ C"], Bool[Array, " C"]], Float[Array, "R C"]],
    first: Array,
    count: int,
    *,
    padded: int,
    members: int,
    interpreted: bool,
) -> list[Float[Array, "O R"]]:
    """Multiply by the same `count` outputs of several matrices, from output `first` on, in float32.

    Args:
        matrices: matrices of one shape, whose arrays are references.
        rows: function that loads inputs, by their places in the order of `member_order`, where a mask is set.
        first: index of the first output.
        count: number of outputs.
        padded: R, number of rows with padding.
        members: bytes of a group that are read at a time.
        interpreted: avoid PTX, which the interpreter does not support.
    """
    (_, half), groups = matrices[0].levels.shape, matrices[0].scale.shape[1]
    width = groups * dividing_block(half // groups, members)
    output = first + jnp.arange(count, dtype=jnp.int32)
    columns = [start + jnp.arange(size, dtype=jnp.int32) for start, size in spans(width)]
    factors = [[_factors(matrix, output, column % groups, column < width) for column in columns] for matrix in matrices]

    def step(i: Array, sums: list[Array]) -> list[Array]:
        for s, column in enumerate(columns):
            exists, place = column < width, i * width + column
            x = [rows((side + place)[None], exists) for side in (0, half)]
            for w, matrix in enumerate(matrices):
                codes = _load(matrix.levels, output[:, None], place[None], exists)
                for each, part in zip(_weights(codes, factors[w][s], interpreted), x, strict=True):
                    sums[w] += jax.lax.dot_general(
                        each, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                    )
        return sums

    nothing = [jnp.zeros((count, padded), jnp.float32) for _ in matrices]
    return [total * 2.0**LOWERED for total in jax.lax.fori_loop(0, half // width, step, nothing)]


def _load(ref: Any, row: Array, column: Array, exists: Bool[Array, " C"]) -> UInt8[Array, "O C"]:
    """Load bytes at some rows and columns."""
    mask = jnp.broadcast_to(exists[None], (row.shape[0], column.shape[1]))
    return backend.load(ref.at[row, column], mask=mask, other=jnp.zeros((), jnp.uint8))


def _factors(matrix: Codes, output: Array, group: Array, exists: Array) -> Float[Array, "O C"]:
    """Factors of numbers in bfloat16, which make them weights divided by 2^LOWERED."""
    exponent = _load(matrix.scale, output[:, None], group[None], exists).astype(jnp.int32) + (126 - LOWERED)
    return _power_of_two(exponent).astype(jnp.bfloat16)


def _power_of_two(exponent: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """2^(exponent - 127) for exponents of 1 or more; infinity for those of 255 or more."""
    return jax.lax.bitcast_convert_type(jnp.minimum(exponent, 255) << 23, jnp.float32)


def _weights(
    codes: UInt8[Array, "O C"], factors: Float[Array, "O C"], interpreted: bool
) -> tuple[Float[Array, "O C"], Float[Array, "O C"]]:
    """Weights of the low and of the high half-bytes, divided by 2^LOWERED."""
    if interpreted:  # without subnormal numbers, which XLA takes for zeros
        power, wide = factors.astype(jnp.float32) * 2.0**-126, codes.astype(jnp.int32)
        low, high = ((number_of(half) * power).astype(jnp.bfloat16) for half in (wide & 15, wide >> 4))
        return low, high
    return _by_ptx(_LOW, codes, factors), _by_ptx(_HIGH, codes, factors)


def _by_ptx(half: str, codes: UInt8[Array, "O C"], factors: Float[Array, "O C"]) -> Float[Array, "O C"]:
    """Do the same for one half. Pallas lowers no PTX with several results."""
    (found,) = backend.elementwise_inline_asm(
        half,
        args=[codes, factors],
        constraints=",".join(["=r"] * 2 + ["r"] * 3),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return found


def number_of(code: Int[Array, "O C"]) -> Float[Array, "O C"]:
    """The e2m1 number of a code."""
    exponent, fraction = (code >> 1) & 3, (code & 1).astype(jnp.float32)
    size = jnp.where(exponent == 0, fraction / 2, (1 + fraction / 2) * _power_of_two(exponent + 126))
    return jnp.where(code >= 8, -size, size)


def _ptx(half: int) -> str:
    """Return PTX for the weights of the low (0) or the high (1) halves of four bytes in bfloat16, two a register.

    Operands 0 and 1 are the results, 2 is the bytes, and 3 and 4 are their factors. Bytes 0 and 1 come into the low bytes
    of both halves of a register, and bytes 2 and 3 into the high ones. A sign moves to bit 15 of its half, and the other
    three bits of a code to bits 8 to 6.
    """
    lines = [".reg .b32 codes, sign, size, zeros, found<2>", "mov.b32 zeros, 0x80008000"]
    lines.append("prmt.b32 codes, $2, 0, 0x3120")
    for pair in range(2):
        lowest = 8 * pair + 4 * half
        lines += [
            _shifted("sign", 12 - lowest),
            _shifted("size", 6 - lowest),
            "and.b32 size, size, 0x01C001C0",
            "lop3.b32 size, sign, 0x80008000, size, 0xEA",  # (sign & mask) | size
            f"fma.rn.bf16x2 found{pair}, size, ${3 + pair}, zeros",
        ]
    # Results are written last, since they may be in registers of operands.
    lines += ["mov.b32 $0, found0", "mov.b32 $1, found1"]
    return "{ " + " ".join(f"{line};" for line in lines) + " }"


def _shifted(to: str, by: int) -> str:
    """Return PTX that shifts the codes to the left, or to the right if `by` is negative."""
    return f"shl.b32 {to}, codes, {by}" if by >= 0 else f"shr.u32 {to}, codes, {-by}"


_LOW, _HIGH = _ptx(0), _ptx(1)
