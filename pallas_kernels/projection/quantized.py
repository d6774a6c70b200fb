"""Matrices in 8 and 4 bits, and their products as XLA computes them: what is multiplied is dequantised on the way.

Both stand where an array of floats stands among a model's parameters. Which numbers a matrix holds is told by its arrays alone, so
that files need nothing but the arrays.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, UInt8

from ..device import target


@flax.struct.dataclass
class Int8Matrix:
    """Eight bits a number and a scale per output, symmetric: `levels * scale`. O outputs, I inputs.

    Attributes:
        levels: -127 to 127.
        scale: of each output, float32.
    """

    levels: Int8[Array, "O I"]
    scale: Float[Array, " O"]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.levels.shape
        return outputs, inputs

    @property
    def kind(self) -> str:
        """How it is called."""
        return "int8"

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return nbytes_of(self)

    def rows(self, indices: Int[Array, "*B"]) -> "Int8Matrix":
        """The matrix of these outputs, in any shape."""
        return Int8Matrix(jnp.take(self.levels, indices, axis=0), jnp.take(self.scale, indices, axis=0))

    def dequantized(self, dtype: Any) -> Float[Array, "*B I"]:
        """The numbers themselves, computed in float32 and rounded once."""
        return (self.levels.astype(jnp.float32) * self.scale.astype(jnp.float32)[..., None]).astype(dtype)

    def product(self, x: Float[Array, "*B I"], dtype: Any) -> Float[Array, "*B O"]:
        """Levels are exact in any type of `x`, so that only the sum is scaled, in float32."""
        levels = self.levels.astype(x.dtype)
        sums = jnp.einsum("...i,oi->...o", x, levels, preferred_element_type=jnp.float32)
        return (sums * jnp.broadcast_to(self.scale, sums.shape)).astype(dtype)


@flax.struct.dataclass
class GroupedMatrix:
    """Four or eight bits a number, with a scale for each group of neighbouring inputs and perhaps what its lowest level stands for:
    `(level - centre) * scale + minimum`. O outputs, G groups of M inputs.

    Groups are the last axis of all arrays: what a scale multiplies lies in its lane then, and XLA's TPU compiler dequantises inside the
    product. (Of 14336 by 4096 numbers and one row, a v5e's step reads 67 MB so, and 389 MB with a group's inputs side by side.)

    Attributes:
        levels: of 8 bits [O, M, G]; of 4 bits two to a byte [O, M / 2, G], the low half is input m of its group, the high one m + M / 2.
        scale: [O, G]; integers where they count units.
        minimum: [O, G], added. Without it the centre of 4 bits is 8; else it is 0.
        scale_unit, minimum_unit: [O, U], each of as many groups in a row; of scales and minima that are integers.
    """

    levels: UInt8[Array, "O half G"] | Int8[Array, "O M G"]
    scale: Float[Array, "O G"] | Int[Array, "O G"]
    minimum: Float[Array, "O G"] | Int[Array, "O G"] | None = None
    scale_unit: Float[Array, "O U"] | None = None
    minimum_unit: Float[Array, "O U"] | None = None

    @property
    def packed(self) -> bool:
        """Whether a byte holds two numbers."""
        return self.levels.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, members, groups = self.levels.shape
        return outputs, members * groups * (2 if self.packed else 1)

    @property
    def kind(self) -> str:
        """How it is called."""
        return "int4" if self.packed else "int8 in groups"

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return nbytes_of(self)

    def rows(self, indices: Int[Array, "*B"]) -> "GroupedMatrix":
        """The matrix of these outputs, in any shape."""
        return jax.tree.map(lambda array: jnp.take(array, indices, axis=0), self)

    def dequantized(self, dtype: Any) -> Float[Array, "*B I"]:
        """The numbers themselves, computed in float32 and rounded once."""
        numbers = jnp.concatenate(self._parts(dtype), axis=-2).swapaxes(-1, -2)
        return numbers.reshape(*numbers.shape[:-2], -1)

    def product(self, x: Float[Array, "*B I"], dtype: Any) -> Float[Array, "*B O"]:
        """Numbers are rounded to the type of `x` and multiplied, in two halves where two are in a byte; the sum is rounded once."""
        groups = self.levels.shape[-1]
        # Inputs in the order of the levels: members of a group first, so that nothing larger than `x` is laid out again.
        x = x.reshape(*x.shape[:-1], groups, -1).swapaxes(-1, -2)
        parts = self._parts(x.dtype)
        sums = [
            jnp.einsum("...mg,omg->...o", part, numbers, preferred_element_type=jnp.float32)
            for part, numbers in zip(jnp.split(x, len(parts), axis=-2), parts, strict=True)
        ]
        return sum(sums[1:], sums[0]).astype(dtype)

    def _parts(self, dtype: Any) -> list[Float[Array, "*B _ G"]]:
        """The numbers by members and groups: all of them, or those in low and in high halves."""
        scale, minimum = (
            _in_units(given, unit, self.levels.shape[-1])
            for given, unit in ((self.scale, self.scale_unit), (self.minimum, self.minimum_unit))
        )
        halves = [self.levels & 15, self.levels >> 4] if self.packed else [self.levels]
        parts = []
        for half in halves:
            numbers = half.astype(jnp.float32)
            if self.packed and minimum is None:
                numbers = numbers - 8.0
            numbers = numbers * scale[..., None, :]
            parts.append((numbers if minimum is None else numbers + minimum[..., None, :]).astype(dtype))
        return parts


QuantizedMatrix = Int8Matrix | GroupedMatrix
"""A matrix that stays in 8 or 4 bits."""

Matrix = Float[Array, "_ _"] | QuantizedMatrix
"""A matrix of weights as checkpoints keep them, outputs first."""


def multiplied(x: Float[Array, "*B I"], w: QuantizedMatrix, dtype: Any) -> Float[Array, "*B O"]:
    """The product with such a matrix, accumulated in float32, dequantised anew each time.

    XLA's TPU compiler does so by itself, but for 4 bits and several rows, of which it may make all floats of a matrix first. For GPUs
    it might dequantise all matrices before a loop that multiplies by them, and keep the floats. For CPUs it begins whatever waits for
    nothing at once, so that all floats are there at a time, and forgets barriers before it orders: so there a matrix waits for the
    first input.
    """
    platform = target().platform
    if platform == "gpu":
        x, w = jax.lax.optimization_barrier((x, w))
    elif platform == "cpu":
        never = jnp.tanh(x.reshape(-1)[0]) > 2  # which the compiler does not know
        w = dataclasses.replace(w, levels=w.levels ^ never.astype(w.levels.dtype))
    return w.product(x, dtype)


def is_quantized(weight: Any) -> bool:
    """Whether this is a matrix in 8 or 4 bits; for `jax.tree` functions that are to stop at one."""
    return isinstance(weight, QuantizedMatrix)


def nbytes_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree, also of shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _in_units(given: Array | None, unit: Array | None, groups: int) -> Any:
    if given is None:
        return None
    given = given.astype(jnp.float32)
    return given if unit is None else given * jnp.repeat(unit.astype(jnp.float32), groups // unit.shape[-1], axis=-1)
