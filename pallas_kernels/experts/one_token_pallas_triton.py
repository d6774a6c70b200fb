"""Triton kernels of `expert_mlp` for a single token and matrices in MXFP4. `few_pairs_pallas_triton.py` calls them.

For one row, the limit is the number of instructions per weight, and the matrix units would multiply seven rows of zeros.
Here weights are multiplied in registers, two at a time, as float16. A code becomes a float16 by moving its bits. This gives
the number times 2^-14, also where its exponent is zero, since float16 without an exponent is subnormal.

Inputs are in float16, too. Each group of 32 is multiplied by a power of two, so that its largest magnitude is at least 2^14
and below 2^15. All but tiny inputs in bfloat16 are then exact. A sum of up to 32 products of a group is below 400. It is
rounded to float16 after each of them. The factors of the weights and of the inputs multiply it in float32.

As in `mxfp4_pallas_triton.py`, neighbouring bytes are of neighbouring groups. A step multiplies the fewest members of all
groups whose bytes are whole words of 4 bytes. Some steps are unrolled, so that their loads are in flight together.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt8

from ..activations import gated
from ..projection.quantized import GroupedMatrix
from ..triton import backend, dividing_block, triton_call
from .mxfp4_pallas_triton import Codes, codes_of, member_order, number_of, spans
from .tiles import Biases

GROUP = 32
"""Inputs of a group."""


@functools.partial(
    jax.jit, static_argnames=("activation", "eps", "offset", "interpret", "units", "outputs", "warps", "together")
)
def expert_outputs(
    experts: Int[Array, " P"],
    x: Float[Array, "1 D"],
    gain: Float[Array, " D"] | None,
    gate: GroupedMatrix,
    up: GroupedMatrix,
    down: GroupedMatrix,
    biases: Biases | None,
    *,
    activation: str,
    eps: float | None,
    offset: float | None,
    interpret: bool,
    units: int,
    outputs: int,
    warps: int,
    together: int,
) -> Float[Array, "P D"]:
    """Return the outputs of each of a token's experts. Those of experts that do not exist are not written.

    Args:
        experts: the token's experts.
        x: the token.
        gain: gain of its RMS norm, if it is normed.
        gate, up, down: matrices, expert after expert.
        biases: biases of the three projections.
        activation: as in `expert_mlp`.
        eps, offset: the other parts of the norm.
        interpret: run in interpret mode.
        units: hidden units of a program, a multiple of 32.
        outputs: outputs of a program of the down projection.
        warps: warps of a program.
        together: maximum number of steps whose loads are in flight together, a power of two.
    """
    (_, dim), width, count = x.shape, down.shape[1], len(experts)
    call = functools.partial(triton_call, interpret=interpret, name="expert_mlp")
    numbers, factors = call(
        functools.partial(_scale, eps=eps, offset=offset),
        warps=8,
        grid=(1,),
        out_shape=_scaled_shapes(1, dim),
    )(x, gain)
    options = {"total": down.shape[0] // dim, "together": together, "interpreted": interpret}
    matrices = [codes_of(w) for w in (gate, up, down)]
    gate_bias, up_bias, down_bias = biases or (None, None, None)
    block = dividing_block(width, units)
    hidden, hidden_factors = call(
        functools.partial(_hidden, **options, units=block, activation=activation),
        warps=warps,
        grid=(count, width // block),
        out_shape=_scaled_shapes(count, width),
    )(experts, numbers, factors, *matrices[:2], gate_bias, up_bias)
    block = dividing_block(dim, outputs)
    return call(
        functools.partial(_outputs, **options, outputs=block),
        warps=warps,
        grid=(count, dim // block),
        out_shape=jax.ShapeDtypeStruct((count, dim), jnp.float32),
    )(experts, hidden, hidden_factors, matrices[2], down_bias)


def _scaled_shapes(rows: int, inputs: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Numbers, and the factor of each group."""
    numbers = jax.ShapeDtypeStruct((rows, inputs), jnp.float16)
    return numbers, jax.ShapeDtypeStruct((rows, inputs // GROUP), jnp.float32)


def _scale(
    x_ref: Any, gain_ref: Any, numbers_ref: Any, factors_ref: Any, *, eps: float | None, offset: float | None
) -> None:
    """Norm a token if it has a gain, and write it in float16."""
    dim, groups = x_ref.shape[1], factors_ref.shape[1]
    group = jnp.arange(pl.next_power_of_2(groups), dtype=jnp.int32)
    column = group[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None]
    exists = column < dim
    x = backend.load(x_ref.at[0, column], mask=exists, other=jnp.zeros((), x_ref.dtype))
    if gain_ref is not None:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / dim + eps)
        gain = backend.load(gain_ref.at[column], mask=exists, other=jnp.zeros((), gain_ref.dtype))
        if offset is None:
            x = wide.astype(x.dtype).astype(jnp.float32) * gain.astype(jnp.float32)
        else:
            x = wide * (gain.astype(jnp.float32) + offset)
        x = x.astype(x_ref.dtype)
    numbers, factors = _scaled(x.astype(jnp.float32))
    place = jnp.where(exists, member_order(column, groups), dim)
    backend.store(numbers_ref.at[0, place], numbers, mask=exists)
    backend.store(factors_ref.at[0, group], factors, mask=group < groups)


def _scaled(x: Float[Array, "G 32"]) -> tuple[Float[Array, "G 32"], Float[Array, " G"]]:
    """Multiply each group by a power of two, and return float16 and the factors of its products with codes.

    With E the biased exponent of the largest magnitude, numbers are multiplied by 2^(141 - E), and codes have been
    multiplied by 2^-14, so that the factor is 2^(E - 127).
    """
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), jnp.int32)
    exponent = jnp.maximum(largest >> 23, 14)
    power, factor = (jax.lax.bitcast_convert_type(each << 23, jnp.float32) for each in (268 - exponent, exponent))
    return (x * power[:, None]).astype(jnp.float16), factor


def _hidden(
    experts_ref: Any,
    x_ref: Any,
    factors_ref: Any,
    gate: Codes,
    up: Codes,
    gate_bias_ref: Any,
    up_bias_ref: Any,
    hidden_ref: Any,
    hidden_factors_ref: Any,
    *,
    total: int,
    units: int,
    activation: str,
    together: int,
    interpreted: bool,
) -> None:
    """Compute some hidden units of an expert, whole groups of them."""
    pair, block, width = pl.program_id(0), pl.program_id(1), hidden_ref.shape[1]
    expert = experts_ref[pair]

    @pl.when((expert >= 0) & (expert < total))
    def _() -> None:
        begin = expert * width + block * units
        sums = _products([gate, up], x_ref, factors_ref, 0, begin, units, together, interpreted)
        first, second = (_biased(s, b, begin) for s, b in zip(sums, (gate_bias_ref, up_bias_ref), strict=True))
        unit = block * units + jnp.arange(units, dtype=jnp.int32).reshape(-1, GROUP)
        numbers, factors = _scaled(gated(activation, first, second).reshape(unit.shape))
        backend.store(hidden_ref.at[pair, member_order(unit, width // GROUP)], numbers)
        group = block * (units // GROUP) + jnp.arange(len(unit), dtype=jnp.int32)
        backend.store(hidden_factors_ref.at[pair, group], factors)


def _outputs(
    experts_ref: Any,
    hidden_ref: Any,
    factors_ref: Any,
    down: Codes,
    bias_ref: Any,
    out_ref: Any,
    *,
    total: int,
    outputs: int,
    together: int,
    interpreted: bool,
) -> None:
    """Compute some outputs of an expert."""
    pair, block, dim = pl.program_id(0), pl.program_id(1), out_ref.shape[1]
    expert = experts_ref[pair]

    @pl.when((expert >= 0) & (expert < total))
    def _() -> None:
        begin = expert * dim + block * outputs
        (found,) = _products([down], hidden_ref, factors_ref, pair, begin, outputs, together, interpreted)
        out_ref[pair, pl.ds(block * outputs, outputs)] = _biased(found, bias_ref, begin)


def _biased(values: Float[Array, " O"], bias_ref: Any, begin: Array) -> Float[Array, " O"]:
    return values if bias_ref is None else values + bias_ref[pl.ds(begin, len(values))].astype(jnp.float32)


def _products(
    matrices: Sequence[Codes],
    x_ref: Any,
    factors_ref: Any,
    row: Any,
    first: Array,
    count: int,
    together: int,
    interpreted: bool,
) -> list[Float[Array, " O"]]:
    """Multiply a row by the same `count` outputs of several matrices, from output `first` on.

    Args:
        matrices: matrices of one shape, whose arrays are references.
        x_ref, factors_ref: numbers of `_scaled` in the order of `member_order`, and their factors.
        row: index of the row.
        first: index of the first output.
        count: O, number of outputs.
        together: maximum number of steps whose loads are in flight together, a power of two.
        interpreted: avoid PTX, which the interpreter does not support.
    """
    (outputs, half), groups = matrices[0].levels.shape, matrices[0].scale.shape[1]
    width = groups * 4 // math.gcd(groups, 4)
    output = _below(outputs, first + jnp.arange(count, dtype=jnp.int32)[:, None])
    row = _below(x_ref.shape[0], row)
    add = _add if interpreted else _add_by_ptx
    together = dividing_block(half // width, together)

    def step(i: Array, partial: list[Array], column: Array, exists: Array | None) -> list[Array]:
        places = [(i * together + number) * width + column for number in range(together)]
        codes = [[_load(matrix.levels, output, place, exists) for place in places] for matrix in matrices]
        for number, place in enumerate(places):
            x = [_load(x_ref, row, side + place, exists) for side in (0, half)]
            partial = [add(total, own[number], *x) for total, own in zip(partial, codes, strict=True)]
        return partial

    sums = [jnp.zeros(count, jnp.float32) for _ in matrices]
    for start, size in spans(width):
        column, group, exists = _columns(start, size, groups, width)
        nothing = [jnp.zeros((count, size), jnp.float16) for _ in matrices]
        here = functools.partial(step, column=column, exists=exists)
        partial = jax.lax.fori_loop(0, half // width // together, here, nothing)
        factors = _load(factors_ref, row, group, exists)
        for w, matrix in enumerate(matrices):
            exponent = _load(matrix.scale, output, group, exists).astype(jnp.int32)
            scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
            sums[w] += jnp.sum(partial[w].astype(jnp.float32) * factors * scale, axis=1)
    return sums


def _below(size: int, index: Any) -> Any:
    """Return an index as it is, but such that the compiler finds a bound of it.

    It then adds numbers to addresses in the load itself. A sum could be above 2^31 otherwise.
    """
    return index & (pl.next_power_of_2(size) - 1)


def _columns(start: int, size: int, groups: int, width: int) -> tuple[Array, Array, Array | None]:
    """Return columns [1, C] and their groups, such that Triton finds words of 4 columns and neighbouring groups in them.

    Threads then load words. With all columns in a row, they would load 16 bytes in four parts.

    Returns:
        Columns, their groups, and which of them are in the width, or None if all are.
    """
    index, together = jnp.arange(size, dtype=jnp.int32)[None], math.gcd(groups, 4)
    column, group = (start + jax.lax.div(index, some) * some for some in (4, together))
    column += jax.lax.rem(index, 4)
    exists = column < width if start + size > width else None
    return column, jax.lax.rem(group, groups) + jax.lax.rem(index, together), exists


def _load(ref: Any, row: Any, column: Int[Array, "1 C"], exists: Bool[Array, "1 C"] | None) -> Array:
    """Load columns of a row or of some rows [O, 1], with zeros for what does not exist."""
    if exists is None:
        return backend.load(ref.at[row, column])
    mask = exists if jnp.ndim(row) == 0 else jnp.broadcast_to(exists, (len(row), exists.shape[1]))
    return backend.load(ref.at[row, column], mask=mask, other=jnp.zeros((), ref.dtype))


def _add(
    total: Float[Array, "O C"], codes: UInt8[Array, "O C"], low: Float[Array, "1 C"], high: Float[Array, "1 C"]
) -> Float[Array, "O C"]:
    """Return `total` plus the numbers of both half-bytes, times 2^-14, times inputs, rounded to float16 each time."""
    for half, x in (codes.astype(jnp.int32) & 15, low), (codes.astype(jnp.int32) >> 4, high):
        product = number_of(half) * 2.0**-14 * x.astype(jnp.float32)
        total = (total.astype(jnp.float32) + product).astype(jnp.float16)
    return total


def _add_by_ptx(
    total: Float[Array, "O C"], codes: UInt8[Array, "O C"], low: Float[Array, "1 C"], high: Float[Array, "1 C"]
) -> Float[Array, "O C"]:
    """Do the same in PTX, for four columns at a time."""
    (found,) = backend.elementwise_inline_asm(
        PTX,
        args=[codes, jnp.broadcast_to(low, codes.shape), jnp.broadcast_to(high, codes.shape), total],
        constraints=",".join(["=r"] * 2 + ["r"] * 7),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float16)],
    )
    return found


def _ptx() -> str:
    """Return PTX for four bytes.

    Operands 0 and 1 are the sums, two a register. 2 is the bytes, 3 to 6 are the inputs of their low and of their high
    halves, and 7 and 8 are the sums before.

    Bytes 0 and 1 come into the high bytes of both halves of a register, and 2 and 3 into the low ones. The sign of a
    half-byte moves to bit 7 of its byte, and the other three bits to bits 3 to 1. In the high byte of a float16, these
    are the sign, the last two bits of the exponent and the first of the fraction.
    """
    lines = [".reg .b32 codes, sign, size, both, pair, sum<2>"]
    lines += ["prmt.b32 codes, $2, 0, 0x1302", "mov.b32 sum0, $7", "mov.b32 sum1, $8"]
    low = "shl.b32 sign, codes, 4", "shl.b32 size, codes, 1"
    high = "mov.b32 sign, codes", "shr.u32 size, codes, 3"
    for moved, first in (low, 3), (high, 5):
        lines += [
            *moved,
            "lop3.b32 both, sign, size, 0x80808080, 0xE4",  # (sign & mask) | (size & ~mask)
            "and.b32 pair, both, 0x8E008E00",
            f"fma.rn.f16x2 sum0, pair, ${first}, sum0",
            "shl.b32 pair, both, 8",
            "and.b32 pair, pair, 0x8E008E00",
            f"fma.rn.f16x2 sum1, pair, ${first + 1}, sum1",
        ]
    # Results are written last, since they may be in registers of operands.
    lines += ["mov.b32 $0, sum0", "mov.b32 $1, sum1"]
    return "{ " + " ".join(f"{line};" for line in lines) + " }"


PTX = _ptx()
"""Adds the products of four bytes and their inputs to four sums."""
