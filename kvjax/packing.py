"""Numbers in a few bits: rounded to evenly spaced levels between the least and the greatest of a group, and packed into bytes.

This is KIVI's scheme (Liu et al. 2024, section 3.1): code = round((x - zero) / scale), with zero the least of a group and scale =
(greatest - least) / (2^bits - 1), so that no number is off by more than scale / 2 (but for the rounding of scale and zero).
"""

from collections.abc import Sequence
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
        codes: levels of a slot's channels, the first in the lowest bits.
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
    shape = _grouped(x.shape, group)
    groups = x.astype(jnp.float32).reshape(shape)
    low, high = (f(groups, axis=(3, 5)) for f in (jnp.min, jnp.max))
    scale = (high - low) / (2**bits - 1)
    # Codes are those of what is stored of scale and zero. In a group of equal numbers all codes are 0.
    scale, zero = jnp.where(scale > 0, scale, 1.0).astype(dtype), low.astype(dtype)
    codes = (groups - _spread(zero)) / _spread(scale)
    codes = jnp.clip(jnp.round(codes), 0, 2**bits - 1).astype(jnp.uint8).reshape(x.shape)
    return Packed(_joined(codes, bits), scale, zero)


def unpack(packed: Packed, bits: Bits, dim: int) -> Float[Array, "B K C H"]:
    """The numbers again, in float32.

    Args:
        dim: H.
    """
    batch, heads, slots, _ = packed.codes.shape
    group = slots // packed.scale.shape[2], dim // packed.scale.shape[3]
    codes = _split(packed.codes, bits)[..., :dim].astype(jnp.float32)
    groups = codes.reshape(_grouped((batch, heads, slots, dim), group))
    return (groups * _spread(packed.scale) + _spread(packed.zero)).reshape(batch, heads, slots, dim)


def empty(shape: tuple[int, int, int, int], bits: Bits, group: tuple[int, int], dtype: Any) -> Packed:
    """Zeros, of shape [B, K, C, H], packed."""
    batch, heads, slots, dim = shape
    groups = batch, heads, slots // group[0], dim // group[1]
    codes = jnp.zeros((batch, heads, slots, -(-dim * bits // 8)), jnp.uint8)
    return Packed(codes, jnp.ones(groups, dtype), jnp.zeros(groups, dtype))


def _grouped(shape: Sequence[int], group: tuple[int, int]) -> tuple[int, ...]:
    batch, heads, slots, dim = shape
    return batch, heads, slots // group[0], group[0], dim // group[1], group[1]


def _spread(x: Float[Array, "B K C1 H1"]) -> Float[Array, "B K C1 1 H1 1"]:
    return x.astype(jnp.float32)[:, :, :, None, :, None]


def _joined(codes: UInt8[Array, "*S H"], bits: Bits) -> UInt8[Array, "*S W"]:
    """Codes that each fill a byte, 8 / bits of them in one."""
    count = 8 // bits
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
    parts = codes.reshape(*codes.shape[:-1], -1, count) << _shifts(bits)
    return jnp.sum(parts, axis=-1, dtype=jnp.uint8)


def _split(words: UInt8[Array, "*S W"], bits: Bits) -> UInt8[Array, "*S H"]:
    codes = (words[..., None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1)


def _shifts(bits: Bits) -> UInt8[Array, " N"]:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)
