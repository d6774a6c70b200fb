"""Quantised keys and values in the layout that attention reads: several slots' codes per byte, one scale and zero per
group.

`kvjax.cache.packing` quantises them.
"""

import functools
import math
from typing import Any, Literal

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

Bits = Literal[2, 3, 4, 8]
"""Bits per code."""

BLOCK = 512
"""Slots of a head that are dequantised at a time."""

Along = Literal["slots", "channels"]
"""Axis of the quantisation groups: slots of one channel (keys), or channels of one slot (values)."""


@flax.struct.dataclass
class Packed:
    """Quantised keys or values. B sequences, K KV heads, C slots, H head dim, CN = C × bits / 8 bytes per channel.

    The last axis of every array is at least as long as a head or the cache. A TPU would pad shorter rows to its 128
    lanes, and copy them.

    Attributes:
        codes: codes of neighbouring slots in shared bytes, for each channel, see `split_codes`.
        scale, zero: of each group of g numbers: [B, K, C / g, H] along slots, [B, K, H / g, C] along channels.
        along: axis of the groups.

    Example:
        >>> state, _ = kvjax.KIVI(bits=2, group=2, residual=4).layer(spec).prefill(prompt, {})
        >>> state.k.along, state.v.along, state.k.codes.dtype, state.k.codes.shape  # four codes in a byte
        ('slots', 'channels', dtype('uint8'), (1, 1, 8, 4))
    """

    codes: UInt8[Array, "B K CN H"]
    scale: Float[Array, "B K X Y"]
    zero: Float[Array, "B K X Y"]
    along: Along = flax.struct.field(pytree_node=False)

    @property
    def slot_axes(self) -> Any:
        """The axis of slots, or of groups of slots, in each array, as a tree of this structure."""
        others = 2 if self.along == "slots" else 3
        return jax.tree.unflatten(jax.tree.structure(self), [2, others, others])

    def part(self, start: Any, size: int, bits: Bits) -> "Packed":
        """Return `size` slots from slot `start` on. Both must be multiples of the slots per group and per run."""
        codes = part_of_codes(self.codes, start, size, bits)
        axis, group = 3, 1
        if self.along == "slots":
            axis, group = 2, self.codes.shape[2] * 8 // bits // self.scale.shape[2]
        scale, zero = (
            jax.lax.dynamic_slice_in_dim(x, start // group, size // group, axis=axis) for x in (self.scale, self.zero)
        )
        return Packed(codes, scale, zero, self.along)


def run_slots(bits: Bits) -> int:
    """Number of slots in a run, whose codes fill whole bytes: 8 with 3 bits, else 8 / bits."""
    return 8 // math.gcd(bits, 8)


def run_bytes(bits: Bits) -> int:
    """Number of bytes of a run: 3 with 3 bits, else 1."""
    return bits // math.gcd(bits, 8)


def words_of(codes: UInt8[Array, "B K CN H"], bits: Bits) -> Shaped[Array, "B K R H"]:
    """Combine the bytes of each run in one unsigned integer. The first byte has the lowest bits."""
    if (number := run_bytes(bits)) == 1:
        return codes
    apart = einops.rearrange(codes, "b k (r n) h -> n b k r h", n=number).astype(jnp.uint32)
    return functools.reduce(jnp.bitwise_or, (byte << jnp.uint32(8 * i) for i, byte in enumerate(apart)))


def bytes_of(words: Shaped[Array, "B K R H"], bits: Bits) -> UInt8[Array, "B K CN H"]:
    """Split the integers of runs into bytes, the inverse of `words_of`."""
    if (number := run_bytes(bits)) == 1:
        return words
    apart = jnp.stack([(words >> jnp.uint32(8 * i)).astype(jnp.uint8) for i in range(number)], axis=3)
    return einops.rearrange(apart, "b k r n h -> b k (r n) h")


def split_codes(codes: UInt8[Array, "B K CN H"], bits: Bits) -> UInt8[Array, "B K C H"]:
    """Unpack the codes of neighbouring slots to one byte each.

    The codes of a run of slots are one little-endian integer, with the first slot in the lowest bits.
    """
    words, mask = words_of(codes, bits), 2**bits - 1
    apart = [(words >> words.dtype.type(bits * i)) & words.dtype.type(mask) for i in range(run_slots(bits))]
    return einops.rearrange(jnp.stack(apart, axis=3), "b k r n h -> b k (r n) h").astype(jnp.uint8)


def part_of_codes(codes: UInt8[Array, "B K CN H"], start: Any, size: int, bits: Bits) -> UInt8[Array, "B K ... H"]:
    """Return the codes of `size` slots from slot `start` on. Both must be multiples of the slots per run."""
    slots, number = run_slots(bits), run_bytes(bits)
    return jax.lax.dynamic_slice_in_dim(codes, start // slots * number, size // slots * number, axis=2)


def unpack(packed: Packed, bits: Bits) -> Float[Array, "B K C H"]:
    """Dequantise to float32."""
    codes = split_codes(packed.codes, bits).astype(jnp.float32)
    scale, zero = (y.astype(jnp.float32) for y in (packed.scale, packed.zero))
    if packed.along == "slots":
        groups = einops.rearrange(codes, "b k (x g) h -> b k x g h", x=scale.shape[2])
        scale, zero = (einops.rearrange(y, "b k x h -> b k x 1 h") for y in (scale, zero))
        return einops.rearrange(groups * scale + zero, "b k x g h -> b k (x g) h")
    groups = einops.rearrange(codes, "b k c (x g) -> b k c x g", x=scale.shape[2])
    scale, zero = (einops.rearrange(y, "b k x c -> b k c x 1") for y in (scale, zero))
    return einops.rearrange(groups * scale + zero, "b k c x g -> b k c (x g)")


def blocks(size: int, group: int) -> tuple[int, int]:
    """Split a cache of `size` slots into equal blocks of whole groups, of at most `BLOCK` slots if possible.

    Returns:
        The number of blocks, and the slots per block.
    """
    groups = size // group
    most = max(BLOCK // group, 1)
    count = next(n for n in range(min(most, groups), 0, -1) if groups % n == 0)
    return groups // count, count * group
