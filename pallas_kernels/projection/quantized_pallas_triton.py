"""Products of a few rows with matrices in 8 and 4 bits, within a Triton kernel: what is read of the matrices is their bits.

For several rows numbers become floats of the inputs' type in registers, as `QuantizedMatrix.product` has them, and the matrix units
multiply. For one row there is little to multiply, and what counts is instructions per number, of which a byte's way to memory leaves
time for some seven: levels become floats by the bits of 2^23 above them, four at a time, and are multiplied as they are; what scales
and minima make of the sums of a group is done once for the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..triton import backend
from .quantized import GroupedMatrix, Int8Matrix, Matrix, QuantizedMatrix

LEAST = 16
"""Numbers that the matrix units multiply at a time, at least."""

TOGETHER = 8
"""Loads of levels that are under way together, at most: of more, two matrices' would not fit in registers."""

ACROSS = (((1,), (1,)), ((), ()))
"""Both are multiplied along their second axis."""


def unsupported_weights(weights: Sequence[QuantizedMatrix]) -> str | None:
    """Why kernels do not multiply by these, or None if they do."""
    for w in weights:
        if isinstance(w, GroupedMatrix) and chunk_of(w.levels.shape[-1]) < LEAST:
            return f"{w.levels.shape[-1]} groups are not a multiple of {LEAST}"
    return None


def alike(weights: Sequence[Matrix]) -> bool:
    """Whether these are of one kind, so that their inputs are in one order."""
    kinds = {(jax.tree.structure(w), w.levels.shape[1:] if isinstance(w, QuantizedMatrix) else ()) for w in weights}
    return len(kinds) == 1


def chunk_of(groups: int, most: int = 128) -> int:
    """Groups whose numbers are multiplied at a time: the largest power of two up to `most` that divides them."""
    return min(most, groups & -groups)


def in_order_of(x: Float[Array, "B I"], w: Matrix) -> Float[Array, "B I"]:
    """Inputs in the order in which a kernel multiplies a matrix: of one in groups, members of all groups side by side."""
    if not isinstance(w, GroupedMatrix):
        return x
    return x.reshape(x.shape[0], w.levels.shape[-1], -1).swapaxes(1, 2).reshape(x.shape)


def products(
    w: QuantizedMatrix, rows: Callable[[Any], Float[Array, "R _"]], first: Array, count: int, padded: int, inputs: int
) -> Float[Array, "O R"]:
    """`count` outputs from `first` on, in float32, of a matrix whose arrays are a kernel's references.

    Args:
        rows: the inputs in some places, in the matrix's order.
        padded: R, rows and those that fill up.
        inputs: how many are multiplied at a time, where they are in no groups.
    """
    here = pl.ds(first, count)
    zeros = jnp.zeros((count, padded), jnp.float32)
    if isinstance(w, Int8Matrix):

        def add(i: Array, total: Array) -> Array:
            at = pl.ds(i * inputs, inputs)
            x = rows(at)
            return total + _product(w.levels[here, at].astype(x.dtype), x)

        total = jax.lax.fori_loop(0, w.levels.shape[1] // inputs, add, zeros)
        return total * w.scale[here].astype(jnp.float32)[:, None]

    members, groups = w.levels.shape[1:]
    size = chunk_of(groups)

    def chunk(i: Array, total: Array) -> Array:
        at = pl.ds(i * size, size)
        place = first, count, i * size, size, groups
        scale = _factors(w.scale, w.scale_unit, *place)
        minimum = None if w.minimum is None else _factors(w.minimum, w.minimum_unit, *place)

        def member(m: Array, total: Array) -> Array:
            levels = w.levels[here, m, at]
            halves = (levels.astype(jnp.int32) & 15, levels.astype(jnp.int32) >> 4) if w.packed else (levels,)
            for half, part in enumerate(halves):
                x = rows(pl.ds((m + half * members) * groups + i * size, size))
                numbers = part.astype(jnp.float32)
                if w.packed and minimum is None:
                    numbers = numbers - 8.0
                numbers = numbers * scale if minimum is None else numbers * scale + minimum
                total += _product(numbers.astype(x.dtype), x)
            return total

        return jax.lax.fori_loop(0, members, member, total)

    return jax.lax.fori_loop(0, groups // size, chunk, zeros)


def with_sums_of(x: Float[Array, "B I"], w: Matrix) -> Float[Array, "B _"]:
    """What `products_of_one` takes: inputs in the matrix's order, in float32, and behind them each group's sum."""
    wide = in_order_of(x, w).astype(jnp.float32)
    if not isinstance(w, GroupedMatrix):
        return wide
    return jnp.concatenate([wide, jnp.sum(wide.reshape(len(x), -1, w.levels.shape[-1]), axis=1)], axis=1)


def products_of_one(
    w: QuantizedMatrix,
    row: Callable[[Any], Float[Array, "1 _"]],
    first: Array,
    count: int,
    inputs: int,
    interpreted: bool,
) -> Float[Array, "O 1"]:
    """The same for one row, by multiplying and adding in registers.

    Args:
        row: of what `with_sums_of` gives.
        inputs: how many are multiplied at a time; of a matrix in groups, members of how many groups, at most.
        interpreted: without the GPU's own instructions.
    """
    here = pl.ds(first, count)
    add = _sums if interpreted else _sums_by_ptx
    if isinstance(w, Int8Matrix):
        steps = w.levels.shape[1] // inputs
        together = chunk_of(steps, TOGETHER)

        def parts(i: Array, total: Array) -> Array:
            for number in range(together):  # unrolled, so that their levels are under way together
                at = pl.ds((i * together + number) * inputs, inputs)
                total = add(total, w.levels[here, at], row(at))
            return total

        total = jax.lax.fori_loop(0, steps // together, parts, jnp.zeros((count, inputs), jnp.float32))
        return jnp.sum(total, axis=1)[:, None] * w.scale[here].astype(jnp.float32)[:, None]

    members, groups = w.levels.shape[1:]
    halves = (0, members) if w.packed else (0,)
    size, together = chunk_of(groups, inputs), chunk_of(members, TOGETHER)
    centre = 8.0 if w.packed and w.minimum is None else 0.0

    def chunk(i: Array, total: Array) -> Array:
        start = i * size
        place = first, count, start, size, groups

        def some(i: Array, sums: Array) -> Array:
            for number in range(together):
                member = i * together + number
                x = [row(pl.ds((member + half) * groups + start, size)) for half in halves]
                sums = add(sums, w.levels[here, member, pl.ds(start, size)], *x)
            return sums

        sums = jax.lax.fori_loop(0, members // together, some, jnp.zeros((count, size), jnp.float32))
        # A number is (level - centre) * scale + minimum: of all but the level, the group's inputs count by their sum.
        group = row(pl.ds(len(halves) * members * groups + start, size))
        found = (sums - centre * group) * _factors(w.scale, w.scale_unit, *place)
        if w.minimum is not None:
            found += group * _factors(w.minimum, w.minimum_unit, *place)
        return total + found

    total = jax.lax.fori_loop(0, groups // size, chunk, jnp.zeros((count, size), jnp.float32))
    return jnp.sum(total, axis=1)[:, None]


def _sums(total: Float[Array, "O X"], levels: Array, *x: Float[Array, "1 X"]) -> Float[Array, "O X"]:
    """`total` and the levels times their inputs: bytes with one, low and high halves with two."""
    if len(x) == 1:
        return total + levels.astype(jnp.float32) * x[0]
    low, high = levels.astype(jnp.int32) & 15, levels.astype(jnp.int32) >> 4
    return total + low.astype(jnp.float32) * x[0] + high.astype(jnp.float32) * x[1]


def _sums_by_ptx(total: Float[Array, "O X"], levels: Array, *x: Float[Array, "1 X"]) -> Float[Array, "O X"]:
    """`_sums`, for four neighbours at a time. Triton would convert each number by itself, and multiply and add apart."""
    (found,) = backend.elementwise_inline_asm(
        _BYTES if len(x) == 1 else _HALVES,
        args=[levels, *(jnp.broadcast_to(each, total.shape) for each in x), total],
        constraints=",".join(["=f"] * 4 + ["r"] + ["f"] * (4 * len(x) + 4)),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return found


def _ptx(parts: Sequence[str], above: int) -> str:
    """PTX that adds levels times inputs to four sums.

    `prmt` puts a byte below the bits of 2^23, so that the float is `above` + its level, from which `above` is taken. Operand 0 to 3 is what
    comes out, 4 the four bytes, 5 to 8 the inputs of the first part's, and so on, the last four the sums.

    Args:
        parts: the instructions that put four levels, a byte each, into `levels`.
        above: 2^23, and what levels are above those that are meant.
    """
    sums = 5 + 4 * len(parts)
    lines = [".reg .b32 levels, number, sum<4>;"]
    lines += [f"mov.b32 sum{i}, ${sums + i};" for i in range(4)]
    for part, instructions in enumerate(parts):
        lines.append(instructions)
        for i in range(4):
            lines += [
                f"prmt.b32 number, levels, 0x4B000000, 0x744{i};",
                f"add.rn.f32 number, number, -{above}.0;",
                f"fma.rn.f32 sum{i}, number, ${5 + 4 * part + i}, sum{i};",
            ]
    lines += [f"mov.b32 ${i}, sum{i};" for i in range(4)]
    return "{ " + " ".join(lines) + " }"


_BYTES = _ptx(["xor.b32 levels, $4, 0x80808080;"], 2**23 + 128)
"""Levels from -128 to 127, made 0 to 255."""

_HALVES = _ptx(["and.b32 levels, $4, 0x0F0F0F0F;", "shr.b32 levels, $4, 4; and.b32 levels, levels, 0x0F0F0F0F;"], 2**23)


def _factors(
    given: Any, unit: Any, first: Array, count: int, start: Array, size: int, groups: int
) -> Float[Array, "O _"]:
    """Scales or minima of some groups, times what they count, which neighbouring groups share."""
    factors = given[pl.ds(first, count), pl.ds(start, size)].astype(jnp.float32)
    if unit is None:
        return factors
    row = (first + jnp.arange(count, dtype=jnp.int32))[:, None]
    column = (start + jnp.arange(size, dtype=jnp.int32))[None] // (groups // unit.shape[1])
    return factors * backend.load(unit.at[row, column]).astype(jnp.float32)


def _product(w: Float[Array, "O I"], x: Float[Array, "R I"]) -> Float[Array, "O R"]:
    return jax.lax.dot_general(w, x, ACROSS, preferred_element_type=jnp.float32)
