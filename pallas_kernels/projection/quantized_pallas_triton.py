"""Products of a few rows with matrices in 8 and 4 bits, within a Triton kernel: what is read of the matrices is their bits.

For several rows numbers become floats of the inputs' type in registers, as `QuantizedMatrix.product` has them, and the matrix units
multiply. For one row there is little to multiply, and what counts is instructions per number: levels are multiplied as they are, in
float32, and what their scales and minima make of the sums of a group is done once for the group.
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


def products_of_one(
    w: QuantizedMatrix, row: Callable[[Any], Float[Array, "1 _"]], first: Array, count: int, inputs: int
) -> Float[Array, "O 1"]:
    """The same for one row of float32, by multiplying and adding in registers.

    Args:
        inputs: how many are multiplied at a time; of a matrix in groups, members of how many groups, at most.
    """
    here = pl.ds(first, count)
    if isinstance(w, Int8Matrix):

        def add(i: Array, total: Array) -> Array:
            at = pl.ds(i * inputs, inputs)
            return total + w.levels[here, at].astype(jnp.float32) * row(at)

        steps = w.levels.shape[1] // inputs
        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((count, inputs), jnp.float32))
        return jnp.sum(total, axis=1)[:, None] * w.scale[here].astype(jnp.float32)[:, None]

    members, groups = w.levels.shape[1:]
    size = chunk_of(groups, inputs)
    centre = 8.0 if w.packed and w.minimum is None else 0.0

    def chunk(i: Array, total: Array) -> Array:
        place = first, count, i * size, size, groups
        sums, offsets = jnp.zeros((count, size), jnp.float32), jnp.zeros((1, size), jnp.float32)
        for member in range(members):  # unrolled, so that their levels are under way together
            levels = w.levels[here, member, pl.ds(i * size, size)]
            parts = (levels.astype(jnp.int32) & 15, levels.astype(jnp.int32) >> 4) if w.packed else (levels,)
            for half, part in enumerate(parts):
                x = row(pl.ds((member + half * members) * groups + i * size, size))
                sums += part.astype(jnp.float32) * x
                offsets += x
        # A number is (level - centre) * scale + minimum: of all but the level, the group's inputs count by their sum.
        found = (sums - centre * offsets) * _factors(w.scale, w.scale_unit, *place)
        if w.minimum is not None:
            found += offsets * _factors(w.minimum, w.minimum_unit, *place)
        return total + found

    total = jax.lax.fori_loop(0, groups // size, chunk, jnp.zeros((count, size), jnp.float32))
    return jnp.sum(total, axis=1)[:, None]


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
