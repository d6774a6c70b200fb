"""8-bit and 4-bit weight matrices, and their XLA matmuls, which dequantise on the fly.

They replace float arrays among a model's parameters. The arrays alone determine the format, so that files need no other
metadata.
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
    """Symmetric int8 weights with one scale per output: `levels * scale`. O outputs, I inputs.

    Attributes:
        levels: codes from -127 to 127.
        scale: scale of each output, float32.

    Example:
        >>> matrix = kvjax.pallas_kernels.Int8Matrix(jnp.asarray([[127, -63]], jnp.int8), jnp.asarray([0.5]))
        >>> kvjax.pallas_kernels.projection(jnp.asarray([[1.0, 1.0]]), matrix)[0].tolist()  # (127 - 63) * 0.5
        [[32.0]]
    """

    levels: Int8[Array, "O I"]
    scale: Float[Array, " O"]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs."""
        outputs, inputs = self.levels.shape
        return outputs, inputs

    @property
    def kind(self) -> str:
        """Name of the format."""
        return "int8"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return nbytes_of(self)

    def rows(self, indices: Int[Array, "*B"]) -> "Int8Matrix":
        """Return the rows of these outputs, as a matrix with batch axes `*B`."""
        return Int8Matrix(jnp.take(self.levels, indices, axis=0), jnp.take(self.scale, indices, axis=0))

    def dequantized(self, dtype: Any) -> Float[Array, "*B I"]:
        """Return the weights, dequantised in float32 and rounded once."""
        return (self.levels.astype(jnp.float32) * self.scale.astype(jnp.float32)[..., None]).astype(dtype)

    def product(self, x: Float[Array, "*B I"], dtype: Any) -> Float[Array, "*B O"]:
        """Multiply inputs by the codes and scale the sums in float32. Codes are exact in the dtype of `x`."""
        levels = self.levels.astype(x.dtype)
        sums = jnp.einsum("...i,oi->...o", x, levels, preferred_element_type=jnp.float32)
        return (sums * jnp.broadcast_to(self.scale, sums.shape)).astype(dtype)


@flax.struct.dataclass
class GroupedMatrix:
    """4-bit or 8-bit weights with one scale, and optionally one minimum, per group of neighbouring inputs.

    A weight is `(level - centre) * scale + minimum`. O outputs, G groups of M inputs. In MXFP4, which has 4-bit codes and
    scales of type uint8 without a unit, it is the floating-point number e2m1 of the code, times 2^(scale - 127).

    Groups are the last axis of all arrays. A scale is then in the lane of the codes that it multiplies, and XLA's TPU
    compiler dequantises inside the matmul. For a matrix of 14336 by 4096 and one row, a step on a v5e then reads 67 MB.
    With a group's inputs adjacent it reads 389 MB.

    Attributes:
        levels: 8-bit codes [O, M, G], or two 4-bit codes per byte [O, M / 2, G]. The low half is input m of its group,
            and the high half is input m + M / 2.
        scale: [O, G]; integers if `scale_unit` is given.
        minimum: [O, G], added to the scaled codes. If it is None, the centre of 4-bit codes is 8; otherwise it is 0.
        scale_unit, minimum_unit: [O, U], factors of integer scales and minima. Each applies to G / U consecutive
            groups.

    Example:
        >>> levels = jnp.asarray([[[0x19], [0x2A]]], jnp.uint8)  # one output and one group of four inputs
        >>> matrix = kvjax.pallas_kernels.GroupedMatrix(levels, jnp.asarray([[0.5]]))
        >>> kvjax.pallas_kernels.lookup(matrix, jnp.asarray([0]), "float32").tolist()  # (code - 8) * 0.5
        [[0.5, 1.0, -3.5, -3.0]]
    """

    levels: UInt8[Array, "O half G"] | Int8[Array, "O M G"]
    scale: Float[Array, "O G"] | Int[Array, "O G"]
    minimum: Float[Array, "O G"] | Int[Array, "O G"] | None = None
    scale_unit: Float[Array, "O U"] | None = None
    minimum_unit: Float[Array, "O U"] | None = None

    @property
    def packed(self) -> bool:
        """Whether a byte has two codes."""
        return self.levels.dtype == jnp.uint8

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes are 4-bit floats, and scales exponents."""
        return self.packed and self.scale.dtype == jnp.uint8 and self.scale_unit is None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs."""
        outputs, members, groups = self.levels.shape
        return outputs, members * groups * (2 if self.packed else 1)

    @property
    def kind(self) -> str:
        """Name of the format."""
        if self.is_mxfp4:
            return "mxfp4"
        return "int4" if self.packed else "int8 in groups"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return nbytes_of(self)

    def rows(self, indices: Int[Array, "*B"]) -> "GroupedMatrix":
        """Return the rows of these outputs, as a matrix with batch axes `*B`."""
        return jax.tree.map(lambda array: jnp.take(array, indices, axis=0), self)

    def dequantized(self, dtype: Any) -> Float[Array, "*B I"]:
        """Return the weights, dequantised in float32 and rounded once."""
        numbers = jnp.concatenate(self._parts(dtype), axis=-2).swapaxes(-1, -2)
        return numbers.reshape(*numbers.shape[:-2], -1)

    def product(self, x: Float[Array, "*B I"], dtype: Any) -> Float[Array, "*B O"]:
        """Multiply by weights rounded to the dtype of `x`, and round the sum once. Packed codes are multiplied in two
        halves.
        """
        groups = self.levels.shape[-1]
        # Reorder the inputs like the codes, members of a group first: nothing larger than `x` changes its layout.
        x = x.reshape(*x.shape[:-1], groups, -1).swapaxes(-1, -2)
        parts = self._parts(x.dtype)
        sums = [
            jnp.einsum("...mg,omg->...o", part, numbers, preferred_element_type=jnp.float32)
            for part, numbers in zip(jnp.split(x, len(parts), axis=-2), parts, strict=True)
        ]
        return sum(sums[1:], sums[0]).astype(dtype)

    def _parts(self, dtype: Any) -> list[Float[Array, "*B _ G"]]:
        """Return the weights by members and groups: all of them, or those of the low and of the high half-bytes."""
        scale, minimum = (
            _in_units(given, unit, self.levels.shape[-1])
            for given, unit in ((self.scale, self.scale_unit), (self.minimum, self.minimum_unit))
        )
        halves = [self.levels & 15, self.levels >> 4] if self.packed else [self.levels]
        if self.is_mxfp4:
            power = _power_of_two(self.scale)[..., None, :]
            return [(_e2m1(half) * power).astype(dtype) for half in halves]
        parts = []
        for half in halves:
            numbers = half.astype(jnp.float32)
            if self.packed and minimum is None:
                numbers = numbers - 8.0
            numbers = numbers * scale[..., None, :]
            parts.append((numbers if minimum is None else numbers + minimum[..., None, :]).astype(dtype))
        return parts


QuantizedMatrix = Int8Matrix | GroupedMatrix
"""A matrix stored as 8-bit or 4-bit codes."""

Matrix = Float[Array, "_ _"] | QuantizedMatrix
"""A weight matrix as in checkpoints, outputs first."""


def multiplied(x: Float[Array, "*B I"], w: QuantizedMatrix, dtype: Any) -> Float[Array, "*B O"]:
    """Multiply by a quantised matrix, accumulating in float32. It is dequantised again in every call.

    XLA needs help to do this, except on TPUs:

    - On TPUs, the compiler dequantises inside the matmul. For 4 bits and several rows it may dequantise the whole
      matrix first.
    - On GPUs, it may dequantise all matrices before a loop that uses them, and keep the results. An optimization
      barrier prevents this.
    - On CPUs, it starts every operation that has no pending inputs, so that all dequantised matrices exist at once, and
      it drops barriers before it schedules. A data dependency on the first input prevents this.
    """
    platform = target().platform
    if platform == "gpu":
        x, w = jax.lax.optimization_barrier((x, w))
    elif platform == "cpu":
        never = jnp.tanh(x.reshape(-1)[0]) > 2  # always False, but not to the compiler
        w = dataclasses.replace(w, levels=w.levels ^ never.astype(w.levels.dtype))
    return w.product(x, dtype)


def is_quantized(weight: Any) -> bool:
    """Return whether this is a quantised matrix, for example as `is_leaf` of `jax.tree` functions.

    Example:
        >>> small = kvjax.conversion.quantize_weights(params, "int8")
        >>> [kvjax.pallas_kernels.is_quantized(model.layers[0].attn.q) for model in (params, small)]
        [False, True]
    """
    return isinstance(weight, QuantizedMatrix)


def nbytes_of(tree: Any) -> int:
    """Return the bytes of all arrays, or array shapes, of a pytree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _e2m1(code: UInt8[Array, "*S"]) -> Float[Array, "*S"]:
    """Numbers of 4-bit codes with a sign, two bits of an exponent and one of a fraction: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
    bits = code.astype(jnp.uint32)
    exponent, fraction = (bits >> 1) & 3, bits & 1
    normal = jax.lax.bitcast_convert_type(((exponent + 126) << 23) | (fraction << 22), jnp.float32)
    size = jnp.where(exponent == 0, fraction.astype(jnp.float32) * 0.5, normal)
    return jnp.where(bits >= 8, -size, size)


def _power_of_two(exponent: UInt8[Array, "*S"]) -> Float[Array, "*S"]:
    """2^(exponent - 127), exactly, of 8-bit exponents."""
    bits = exponent.astype(jnp.uint32) << 23
    return jax.lax.bitcast_convert_type(jnp.maximum(bits, jnp.uint32(1 << 22)), jnp.float32)


def _in_units(given: Array | None, unit: Array | None, groups: int) -> Any:
    if given is None:
        return None
    given = given.astype(jnp.float32)
    return given if unit is None else given * jnp.repeat(unit.astype(jnp.float32), groups // unit.shape[-1], axis=-1)
