"""Numbers in a few bits: rounded to evenly spaced levels between the least and the greatest of a group, and packed into bytes.

This is KIVI's scheme (Liu et al. 2024, section 3.1): code = round((x - zero) / scale), with zero the least of a group and scale =
(greatest - least) / (2^bits - 1), so that no number is off by more than scale / 2 (but for the rounding of scale and zero).
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

Bits = Literal[2, 4, 8]
"""Sizes of a code."""


@flax.struct.dataclass
class Packed:
    """Keys or values in a few bits. B rows, K KV heads, C slots, H head dim, W = ⌈H · bits / 8⌉ bytes.

    Attributes:
        codes: levels of a slot's channels: channel w of the first W in the lowest bits of byte w, of the next W in those above, and
            so on, so that unpacking moves no byte to another lane.
        scale, zero: of each group of numbers: [B, K, C / g, H] where it is g slots of one channel, [B, K, C, H / g] where it is g
            channels of one slot.
    """

    codes: UInt8[Array, "B K C W"]
    scale: Float[Array, "B K C1 H1"]
    zero: Float[Array, "B K C1 H1"]

    def part(self, start: Any, size: int) -> "Packed":
        """`size` slots from `start` on; both multiples of the slots in a group."""
        ratio = self.codes.shape[2] // self.scale.shape[2]

        def cut(x: Array, ratio: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start // ratio, size // ratio, axis=2)

        return Packed(cut(self.codes, 1), cut(self.scale, ratio), cut(self.zero, ratio))


def pack(x: Float[Array, "B K C H"], bits: Bits, group: tuple[int, int], dtype: Any) -> Packed:
    """Keys or values in few bits.

    Args:
        group: slots and channels of a group; they divide C and H.
        dtype: type of scales and zeros.
    """
    batch, heads, slots, dim = x.shape
    rows = x.astype(jnp.float32).reshape(batch, heads, slots // group[0], group[0], dim)

    def extreme(reduce: Callable[..., Array]) -> Float[Array, "B K C1 H1"]:
        of_channels = reduce(rows, axis=3)
        return reduce(of_channels.reshape(*of_channels.shape[:3], -1, group[1]), axis=4)

    low, high = extreme(jnp.min), extreme(jnp.max)
    scale = (high - low) / (2**bits - 1)
    # Codes are those of what is stored of scale and zero. In a group of equal numbers all codes are 0.
    scale, zero = jnp.where(scale > 0, scale, 1.0).astype(dtype), low.astype(dtype)
    codes = (rows - _spread(zero, dim)) / _spread(scale, dim)
    codes = jnp.clip(jnp.round(codes), 0, 2**bits - 1).astype(jnp.uint8).reshape(x.shape)
    return Packed(_joined(codes, bits), scale, zero)


def unpack(packed: Packed, bits: Bits, dim: int) -> Float[Array, "B K C H"]:
    """The numbers again, in float32.

    Args:
        dim: H.
    """
    batch, heads, slots, _ = packed.codes.shape
    codes = _split(packed.codes, bits)[..., :dim].astype(jnp.float32)
    rows = codes.reshape(batch, heads, packed.scale.shape[2], -1, dim)
    return (rows * _spread(packed.scale, dim) + _spread(packed.zero, dim)).reshape(batch, heads, slots, dim)


def _spread(x: Float[Array, "B K C1 H1"], dim: int) -> Float[Array, "B K C1 1 H"]:
    """What belongs to a group, for each of its channels."""
    return jnp.repeat(x.astype(jnp.float32), dim // x.shape[-1], axis=-1)[:, :, :, None]


def _joined(codes: UInt8[Array, "*S H"], bits: Bits) -> UInt8[Array, "*S W"]:
    """Codes that each fill a byte, 8 / bits of them in one."""
    count = 8 // bits
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    words, *others = jnp.split(codes, count, axis=-1)
    for i, part in enumerate(others, start=1):
        words |= part << jnp.uint8(bits * i)
    return words


def _split(words: UInt8[Array, "*S W"], bits: Bits) -> UInt8[Array, "*S H"]:
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([(words >> jnp.uint8(shift)) & mask for shift in range(0, 8, bits)], axis=-1)
