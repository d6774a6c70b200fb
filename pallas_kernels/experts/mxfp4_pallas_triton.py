"""Products with rows of MXFP4 matrices inside the Triton kernels for few pairs. They only read the codes and scales.

A matrix has its codes by members of groups: the 16 bytes of a group are as far apart as there are groups. A step of the
loop reads one byte of each group, so that each thread keeps the scales of its groups in registers. Numbers of groups
that are no power of two are cut into spans of at most `SPAN`, of which only the last is masked.

Codes are placed where exponent and fraction of a float begin, from the right. This gives e2m1 numbers times a constant
power of two, also where their exponent is zero, since floats without an exponent are subnormal. Factors, which are
powers of two, undo that.

For one row, the sums of each group are multiplied by its scale, without matrix units. For several rows, codes are
multiplied by their scales in registers, and the matrix units multiply.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt8

from ..projection.quantized import GroupedMatrix
from ..triton import backend, dividing_block

SPAN = 64
"""Maximum number of groups that a program reads at a time."""

LEAST = 16
"""Minimum number of groups that the matrix units multiply."""

LIFT = 64
"""Inputs of a single row are multiplied by 2^LIFT, so that no sum of subnormal numbers is subnormal."""

LOWERED = 32
"""Weights for the matrix units are divided by 2^LOWERED, as their factors would not be finite otherwise."""

Span = tuple[Int[Array, " G"], Bool[Array, " G"]]
"""Some groups, and whether they exist."""


def spans(groups: int) -> list[tuple[int, int]]:
    """Return the first group of each span, and its size, a power of two."""
    found = [(start, min(SPAN, groups - start)) for start in range(0, groups, SPAN)]
    return [(start, max(LEAST, pl.next_power_of_2(size))) for start, size in found]


def member_order(inputs: Int[Array, " I"], groups: int) -> Int[Array, " I"]:
    """Return the places of inputs in the order in which matrices are multiplied, that of `in_order_of`."""
    return inputs % 32 * groups + inputs // 32


def products(
    matrices: Sequence[GroupedMatrix],
    rows: Callable[[Int[Array, " G"], Bool[Array, " G"]], Float[Array, "R G"]],
    first: Array,
    count: int,
    padded: int,
    *,
    members: int,
    interpreted: bool,
) -> list[Float[Array, "O R"]]:
    """Multiply by the same `count` outputs of several matrices, from output `first` on, in float32.

    Args:
        matrices: matrices of one shape, whose arrays are references.
        rows: function that loads inputs, by their places in the order of `member_order`, where a mask is set.
        first: index of the first output.
        count: number of outputs.
        padded: R, number of rows with padding. A single row is multiplied without matrix units.
        members: bytes of a group that are read at a time.
        interpreted: avoid PTX, which the interpreter does not support.
    """
    output = first + jnp.arange(count, dtype=jnp.int32)
    half, groups = matrices[0].levels.shape[1:]
    together = dividing_block(half, members)
    places: list[Span] = []
    for start, size in spans(groups):
        group = start + jnp.arange(size, dtype=jnp.int32)
        places.append((group, group < groups))
    make, add = (_group_factors, _add_by_group) if padded == 1 else (_weight_factors, _add_by_units)
    factors = [[make(w, output, *place) for place in places] for w in matrices]

    def step(i: Array, sums: list[list[Array]]) -> list[list[Array]]:
        for number in range(together):  # unrolled, so that their loads are in flight together
            member = i * together + number
            for s, (group, exists) in enumerate(places):
                x = [rows(place * groups + group, exists) for place in (member, member + half)]
                for w, matrix in enumerate(matrices):
                    codes = _load(matrix.levels.at[output[:, None], member, group[None]], exists, count)
                    sums[w][s] = add(sums[w][s], codes, factors[w][s], *x, interpreted)
        return sums

    nothing = [
        [jnp.zeros((count, len(group) if padded == 1 else padded), jnp.float32) for group, _ in places]
        for _ in matrices
    ]
    found = jax.lax.fori_loop(0, half // together, step, nothing)
    if padded == 1:
        return [
            sum(jnp.sum(total * factor, axis=1) for total, factor in zip(*each, strict=True))[:, None]
            for each in zip(found, factors, strict=True)
        ]
    return [sum(each[1:], each[0]) * 2.0**LOWERED for each in found]


def _load(ref: Any, exists: Bool[Array, " G"], count: int) -> UInt8[Array, "O G"]:
    """Load bytes of some groups of all outputs."""
    mask = jnp.broadcast_to(exists[None], (count, len(exists)))
    return backend.load(ref, mask=mask, other=jnp.zeros((), jnp.uint8))


def _power_of_two(exponent: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """2^(exponent - 127) for exponents of 1 or more; infinity for those of 255 or more."""
    return jax.lax.bitcast_convert_type(jnp.minimum(exponent, 255) << 23, jnp.float32)


def _scale(matrix: GroupedMatrix, output: Array, group: Array, exists: Array) -> Int[Array, "O G"]:
    return _load(matrix.scale.at[output[:, None], group[None]], exists, len(output)).astype(jnp.int32)


def _group_factors(matrix: GroupedMatrix, *place: Array) -> Float[Array, "O G"]:
    """Factors of the sums of groups: their scales, and what inputs and numbers were divided by."""
    return _power_of_two(_scale(matrix, *place) + (126 - LIFT))


def _weight_factors(matrix: GroupedMatrix, *place: Array) -> Float[Array, "O G"]:
    """Factors of numbers in bfloat16, which make them weights divided by 2^LOWERED."""
    return _power_of_two(_scale(matrix, *place) + (126 - LOWERED)).astype(jnp.bfloat16)


def _add_by_group(
    total: Float[Array, "O G"],
    codes: UInt8[Array, "O G"],
    factors: Any,
    low: Float[Array, "1 G"],
    high: Float[Array, "1 G"],
    interpreted: bool,
) -> Float[Array, "O G"]:
    """Return `total` plus e2m1 numbers times 2^(LIFT - 126) times inputs, for one row."""
    if interpreted:  # without subnormal numbers, which XLA takes for zeros
        x = [each.astype(jnp.float32) * 2.0 ** (LIFT - 126) for each in (low, high)]
        return sum((number * each for number, each in zip(_numbers(codes), x, strict=True)), total)
    x = [jnp.broadcast_to(each.astype(jnp.float32) * 2.0**LIFT, total.shape) for each in (low, high)]
    (found,) = backend.elementwise_inline_asm(
        _SUMS,
        args=[codes, *x, total],
        constraints=",".join(["=f"] * 4 + ["r"] + ["f"] * 12),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return found


def _add_by_units(
    total: Float[Array, "O R"],
    codes: UInt8[Array, "O G"],
    factors: Float[Array, "O G"],
    low: Float[Array, "R G"],
    high: Float[Array, "R G"],
    interpreted: bool,
) -> Float[Array, "O R"]:
    """Return `total` plus the products of several rows."""
    if interpreted:
        power = factors.astype(jnp.float32) * 2.0**-126
        numbers = [(each * power).astype(jnp.bfloat16) for each in _numbers(codes)]
    else:
        numbers = [_weights_of(half, codes, factors) for half in _WEIGHTS]
    for each, x in zip(numbers, (low, high), strict=True):
        total += jax.lax.dot_general(each, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return total


def _weights_of(half: str, codes: UInt8[Array, "O G"], factors: Float[Array, "O G"]) -> Float[Array, "O G"]:
    """Weights of the low or of the high half-bytes. Pallas lowers no PTX with several results."""
    (found,) = backend.elementwise_inline_asm(
        half,
        args=[codes, factors],
        constraints=",".join(["=r"] * 2 + ["r"] * 3),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return found


def _numbers(codes: UInt8[Array, "O G"]) -> list[Float[Array, "O G"]]:
    """e2m1 numbers of the low and the high half-bytes, in float32, without PTX."""
    return [_number(codes.astype(jnp.int32) & 15), _number(codes.astype(jnp.int32) >> 4)]


def _number(code: Int[Array, "O G"]) -> Float[Array, "O G"]:
    exponent, fraction = (code >> 1) & 3, (code & 1).astype(jnp.float32)
    size = jnp.where(exponent == 0, fraction / 2, (1 + fraction / 2) * _power_of_two(exponent + 126))
    return jnp.where(code >= 8, -size, size)


def _ptx(registers: str, lines: Sequence[str]) -> str:
    return "{ .reg .b32 " + registers + "; " + " ".join(f"{line};" for line in lines) + " }"


def _sums() -> str:
    """Return PTX that adds numbers of four bytes times inputs to four sums.

    Operands 0 to 3 are the results, and 4 is the bytes. Operands 5 to 8 are the inputs of their low halves, 9 to 12 those
    of their high halves, and 13 to 16 the sums. A sign moves to bit 31, and the other three bits of a code to bits 24 to 22.
    """
    lines = [f"mov.b32 sum{byte}, ${13 + byte}" for byte in range(4)]
    for byte in range(4):
        for half in range(2):
            at = 8 * byte + 4 * half  # lowest bit of the code
            lines += [
                _shifted("sign", "$4", 28 - at),
                _shifted("size", "$4", 22 - at),
                "and.b32 size, size, 0x01C00000",
                "lop3.b32 size, sign, 0x80000000, size, 0xEA",  # (sign & mask) | size
                f"fma.rn.f32 sum{byte}, size, ${5 + 4 * half + byte}, sum{byte}",
            ]
    return _ptx("sign, size, sum<4>", [*lines, *(f"mov.b32 ${byte}, sum{byte}" for byte in range(4))])


def _weights(half: int) -> str:
    """Return PTX for the weights of the low (0) or the high (1) halves of four bytes in bfloat16, two a register.

    Operands 0 and 1 are the results, 2 is the bytes, and 3 and 4 are their factors. Bytes 0 and 1 come into the low bytes
    of both halves of a register, and bytes 2 and 3 into the high ones. A sign moves to bit 15 of its half, and the other
    three bits of a code to bits 8 to 6.
    """
    lines = ["mov.b32 zeros, 0x80008000", "prmt.b32 codes, $2, 0, 0x3120"]
    for pair in range(2):
        at = 8 * pair + 4 * half
        lines += [
            _shifted("sign", "codes", 12 - at),
            _shifted("size", "codes", 6 - at),
            "and.b32 size, size, 0x01C001C0",
            "lop3.b32 size, sign, 0x80008000, size, 0xEA",
            f"fma.rn.bf16x2 found{pair}, size, ${3 + pair}, zeros",
        ]
    # Results are written last, since they may be in registers of operands.
    return _ptx("codes, sign, size, zeros, found<2>", [*lines, "mov.b32 $0, found0", "mov.b32 $1, found1"])


def _shifted(to: str, register: str, by: int) -> str:
    """Return PTX that shifts to the left, or to the right if `by` is negative."""
    return f"shl.b32 {to}, {register}, {by}" if by >= 0 else f"shr.u32 {to}, {register}, {-by}"


_SUMS, _WEIGHTS = _sums(), (_weights(0), _weights(1))
