"""Ways to store vectors of a quantised cache, in which every token is coded when it comes.

A codec has a store, which is a pytree, and pure functions on it. It is static: layers hold it, programs are compiled for it.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float, Int

from . import codebook, float8, packing
from .packing import Bits


class Codec(Protocol):
    """How keys or values are stored. B rows, K KV heads, C slots, H head dim.

    Attributes:
        run: number of neighbouring slots that share bytes.
        matrix: the rotation in which vectors are decoded, None for none.
    """

    @property
    def run(self) -> int: ...

    @property
    def matrix(self) -> np.ndarray | None: ...

    def encode(self, x: Float[Array, "B K C H"]) -> Any:
        """Store vectors. C is a multiple of `run`."""
        ...

    def put(self, stored: Any, x: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> Any:
        """Set one slot of each head. Slots out of bounds are dropped."""
        ...

    def put_run(
        self, stored: Any, x: Float[Array, "B K W H"], start: Int[Array, "B K"], stop: Int[Array, "B K"]
    ) -> Any:
        """Set slots `start` to `stop` of each head. `x` begins with the first slot of the run of `start`."""
        ...

    def decode(self, stored: Any) -> Float[Array, "B K C H"]:
        """Return the vectors in float32, rotated by `matrix` if there is one."""
        ...

    def part(self, stored: Any, start: Any, size: int) -> Any:
        """Return `size` slots from `start` on. Both are multiples of `run`."""
        ...


@dataclasses.dataclass(frozen=True)
class Levels:
    """Evenly spaced entries between the minimum and maximum of a group of channels, see `packing`.

    Attributes:
        bits: bits per code.
        group: channels that share a scale and a zero.
        dtype: dtype of scales and zeros.
    """

    bits: Bits
    group: int
    dtype: Any
    matrix = None

    @property
    def run(self) -> int:
        return packing.run_slots(self.bits)

    def encode(self, x: Float[Array, "B K C H"]) -> packing.Packed:
        return packing.pack(x, self.bits, self.group, "channels", self.dtype)

    def put(self, stored: Any, x: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> packing.Packed:
        return packing.put(stored, x, slot, self.bits, self.group, self.dtype)

    def put_run(
        self, stored: Any, x: Float[Array, "B K W H"], start: Int[Array, "B K"], stop: Int[Array, "B K"]
    ) -> packing.Packed:
        return packing.put_run(stored, x, start, stop, self.bits, self.group, self.dtype)

    def decode(self, stored: Any) -> Float[Array, "B K C H"]:
        return packing.unpack(stored, self.bits)

    def part(self, stored: Any, start: Any, size: int) -> packing.Packed:
        return stored.part(start, size, self.bits)


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Codes of rotated vectors, see `codebook`.

    Attributes:
        bits: bits per code.
        dim: H.
        signs: seed of sign changes before the rotation, None for none.
        dtype: dtype of the factors.
    """

    bits: Bits
    dim: int
    signs: int | None
    dtype: Any

    @property
    def run(self) -> int:
        return packing.run_slots(self.bits)

    @property
    def matrix(self) -> np.ndarray:
        return codebook.rotation(self.dim, self.signs)

    def encode(self, x: Float[Array, "B K C H"]) -> codebook.Coded:
        return codebook.encode(x, self.bits, self.matrix, self.dtype)

    def put(self, stored: Any, x: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> codebook.Coded:
        return codebook.put(stored, x, slot, self.bits, self.matrix)

    def put_run(
        self, stored: Any, x: Float[Array, "B K W H"], start: Int[Array, "B K"], stop: Int[Array, "B K"]
    ) -> codebook.Coded:
        return codebook.put_run(stored, x, start, stop, self.bits, self.matrix)

    def decode(self, stored: Any) -> Float[Array, "B K C H"]:
        return codebook.decode(stored, self.bits)

    def part(self, stored: Any, start: Any, size: int) -> codebook.Coded:
        return stored.part(start, size, self.bits)


@dataclasses.dataclass(frozen=True)
class Floats:
    """8-bit floats with one factor per vector, see `float8`."""

    run = 1
    matrix = None
    encode = staticmethod(float8.encode)
    put = staticmethod(float8.put)
    put_run = staticmethod(float8.put_run)
    decode = staticmethod(float8.decode)

    def part(self, stored: Any, start: Any, size: int) -> float8.Float8:
        return stored.part(start, size)
