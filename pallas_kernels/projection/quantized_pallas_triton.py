"""Matmuls of a few rows with 8-bit and 4-bit weights inside the Triton kernels of `pallas_triton.py`. They only read
the codes.

For several rows, weights are dequantised in registers to the dtype of the inputs, as in `QuantizedMatrix.product`, and
the matrix units multiply.

For one row, the limit is the number of instructions per weight: about seven fit into the time that memory takes per
byte. Codes become floats by placing their bits below those of 2^23, four codes at a time. They are multiplied unscaled.
Scales and minima are applied to the sums, once per group.
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
"""Minimum size of a matmul on the matrix units."""

TOGETHER = 8
"""Maximum number of loads of codes in flight. With more, those of two matrices would not fit in registers."""

ACROSS = (((1,), (1,)), ((), ()))
"""Dimension numbers: contract the second axis of both operands."""


def unsupported_weights(weights: Sequence[QuantizedMatrix]) -> str | None:
    """Return why the kernels do not support these weights, or None if they do."""
    for w in weights:
        if isinstance(w, GroupedMatrix) and chunk_of(w.levels.shape[-1]) < LEAST:
            return f"{w.levels.shape[-1]} groups are not a multiple of {LEAST}"
        if isinstance(w, GroupedMatrix) and w.is_mxfp4:
            return "weights are in MXFP4"
    return None


def alike(weights: Sequence[Matrix]) -> bool:
    """Return whether all matrices have one format, so that their inputs have the same order."""
    kinds = {(jax.tree.structure(w), w.levels.shape[1:] if isinstance(w, QuantizedMatrix) else ()) for w in weights}
    return len(kinds) == 1


def chunk_of(groups: int, most: int = 128) -> int:
    """Return the number of groups multiplied at a time: the largest power of two up to `most` that divides `groups`."""
    return min(most, groups & -groups)


def in_order_of(x: Float[Array, "B I"], w: Matrix) -> Float[Array, "B I"]:
    """Return the inputs in the order in which a kernel multiplies a matrix: for groups, the same member of all groups
    adjacent.
    """
    if not isinstance(w, GroupedMatrix):
        return x
    return x.reshape(x.shape[0], w.levels.shape[-1], -1).swapaxes(1, 2).reshape(x.shape)


def products(
    w: QuantizedMatrix, rows: Callable[[Any], Float[Array, "R _"]], first: Array, count: int, padded: int, inputs: int
) -> Float[Array, "O R"]:
    """Multiply by `count` outputs from output `first` on, in float32, of a matrix whose arrays are references.

    Args:
        w: the matrix.
        rows: function that loads a span of the inputs, in the matrix's order.
        first: index of the first output.
        count: number of outputs.
        padded: R, number of rows with padding.
        inputs: inputs multiplied at a time, for a matrix without groups.
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
    """Return the inputs of `products_of_one`: in the matrix's order and in float32, followed by each group's sum."""
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
    """Do the same for one row, in registers without matrix units.

    Args:
        w: the matrix.
        row: function that loads a span of the result of `with_sums_of`.
        first: index of the first output.
        count: number of outputs.
        inputs: inputs multiplied at a time; for a matrix with groups, the maximum number of groups.
        interpreted: avoid PTX, which the interpreter does not support.
    """
    here = pl.ds(first, count)
    add = _sums if interpreted else _sums_by_ptx
    if isinstance(w, Int8Matrix):
        steps = w.levels.shape[1] // inputs
        together = chunk_of(steps, TOGETHER)

        def parts(i: Array, total: Array) -> Array:
            for number in range(together):  # unrolled, so that their loads are in flight together
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
        # A weight is (code - centre) * scale + minimum. The centre and the minimum multiply the sum of the group's
        # inputs.
        group = row(pl.ds(len(halves) * members * groups + start, size))
        found = (sums - centre * group) * _factors(w.scale, w.scale_unit, *place)
        if w.minimum is not None:
            found += group * _factors(w.minimum, w.minimum_unit, *place)
        return total + found

    total = jax.lax.fori_loop(0, groups // size, chunk, jnp.zeros((count, size), jnp.float32))
    return jnp.sum(total, axis=1)[:, None]


def _sums(total: Float[Array, "O X"], levels: Array, *x: Float[Array, "1 X"]) -> Float[Array, "O X"]:
    """Return `total` plus codes times inputs. Bytes are one code with one input, or two half-bytes with two inputs."""
    if len(x) == 1:
        return total + levels.astype(jnp.float32) * x[0]
    low, high = levels.astype(jnp.int32) & 15, levels.astype(jnp.int32) >> 4
    return total + low.astype(jnp.float32) * x[0] + high.astype(jnp.float32) * x[1]


def _sums_by_ptx(total: Float[Array, "O X"], levels: Array, *x: Float[Array, "1 X"]) -> Float[Array, "O X"]:
    """Do the same as `_sums` in PTX, for four adjacent columns at a time.

    Triton would convert each code by itself, and not fuse multiplication and addition.
    """
    (found,) = backend.elementwise_inline_asm(
        _BYTES if len(x) == 1 else _HALVES,
        args=[levels, *(jnp.broadcast_to(each, total.shape) for each in x), total],
        constraints=",".join(["=f"] * 4 + ["r"] + ["f"] * (4 * len(x) + 4)),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return found


def _ptx(parts: Sequence[str], above: int) -> str:
    """Return PTX that adds codes times inputs to four sums.

    `prmt` places a byte in the lowest bits of 2^23, which gives the float `above` + code, and `above` is subtracted.
    Operands 0 to 3 are the results, and 4 is the four bytes. Operands 5 to 8 are the inputs of the first part, and so
    on. The last four are the sums.

    Args:
        parts: instructions that put four codes, one per byte, into `levels`.
        above: 2^23, plus the offset of the codes.
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
"""PTX for codes from -128 to 127, offset to 0 to 255."""

_HALVES = _ptx(["and.b32 levels, $4, 0x0F0F0F0F;", "shr.b32 levels, $4, 4; and.b32 levels, levels, 0x0F0F0F0F;"], 2**23)


def _factors(
    given: Any, unit: Any, first: Array, count: int, start: Array, size: int, groups: int
) -> Float[Array, "O _"]:
    """Load the scales or minima of some groups, and multiply them by their units, which neighbouring groups share."""
    factors = given[pl.ds(first, count), pl.ds(start, size)].astype(jnp.float32)
    if unit is None:
        return factors
    row = (first + jnp.arange(count, dtype=jnp.int32))[:, None]
    column = (start + jnp.arange(size, dtype=jnp.int32))[None] // (groups // unit.shape[1])
    return factors * backend.load(unit.at[row, column]).astype(jnp.float32)


def _product(w: Float[Array, "O I"], x: Float[Array, "R I"]) -> Float[Array, "O R"]:
    return jax.lax.dot_general(w, x, ACROSS, preferred_element_type=jnp.float32)
