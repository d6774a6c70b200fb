"""Numbers in a few bits: rounded to evenly spaced levels between the least and the greatest of a group, and packed into bytes.

This is KIVI's scheme (Liu et al. 2024, section 3.1): code = round((x - zero) / scale), with zero the least of a group and scale =
(greatest - least) / (2^bits - 1), so that no number is off by more than scale / 2 (but for the rounding of scale and zero).
"""

from typing import Any, Literal

import einops
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

Bits = Literal[2, 4, 8]
"""Sizes of a code."""

BLOCK = 512
"""Slots of a head that are unpacked at a time."""

Along = Literal["slots", "channels"]
"""What a group of numbers runs along: slots of one channel, as keys have it, or channels of one slot, as values do."""


@flax.struct.dataclass
class Packed:
    """Keys or values in a few bits. B rows, K KV heads, C slots, H head dim, n = 8 / bits codes in a byte.

    No array's rows are narrower than a head or the cache: a TPU would pad shorter ones to its 128 lanes, and copy them.

    Attributes:
        codes: levels of n neighbouring slots in one byte for each channel, the first slot's in the lowest bits.
        scale, zero: of each group of g numbers: [B, K, C / g, H] along slots, [B, K, H / g, C] along channels.
        along: what groups run along.
    """

    codes: UInt8[Array, "B K CN H"]
    scale: Float[Array, "B K X Y"]
    zero: Float[Array, "B K X Y"]
    along: Along = flax.struct.field(pytree_node=False)

    @property
    def slot_axes(self) -> Any:
        """Along which axis each array has slots, or what several of them have together."""
        others = 2 if self.along == "slots" else 3
        leaves, structure = [2, others, others], jax.tree.structure(self)
        return jax.tree.unflatten(structure, leaves)

    def part(self, start: Any, size: int, bits: Bits) -> "Packed":
        """`size` slots from `start` on; both multiples of the slots in a group and of those in a byte."""
        count = 8 // bits
        codes = jax.lax.dynamic_slice_in_dim(self.codes, start // count, size // count, axis=2)
        axis, group = 3, 1
        if self.along == "slots":
            axis, group = 2, self.codes.shape[2] * count // self.scale.shape[2]
        scale, zero = (
            jax.lax.dynamic_slice_in_dim(x, start // group, size // group, axis=axis) for x in (self.scale, self.zero)
        )
        return Packed(codes, scale, zero, self.along)


def quantise(
    x: Float[Array, "B K C H"], bits: Bits, group: int, along: Along, dtype: Any
) -> tuple[UInt8[Array, "B K C H"], Float[Array, "B K X Y"], Float[Array, "B K X Y"]]:
    """Codes, a byte each, and what they are levels between: scales and zeros as in `Packed`.

    Args:
        group: slots or channels of a group; it divides C or H.
        dtype: type of scales and zeros.
    """
    batch, heads, slots, dim = x.shape
    shape = (slots // group, group, dim) if along == "slots" else (slots, dim // group, group)
    axis = 3 if along == "slots" else 4
    groups = x.astype(jnp.float32).reshape(batch, heads, *shape)
    low, high = jnp.min(groups, axis=axis), jnp.max(groups, axis=axis)
    scale = (high - low) / (2**bits - 1)
    # Codes are those of what is stored of scale and zero. In a group of equal numbers all codes are 0.
    scale, zero = jnp.where(scale > 0, scale, 1.0).astype(dtype), low.astype(dtype)
    wide_scale, wide_zero = (jnp.expand_dims(y.astype(jnp.float32), axis) for y in (scale, zero))
    codes = jnp.clip(jnp.round((groups - wide_zero) / wide_scale), 0, 2**bits - 1)
    if along == "channels":
        scale, zero = (jnp.swapaxes(y, 2, 3) for y in (scale, zero))
    return codes.astype(jnp.uint8).reshape(x.shape), scale, zero


def pack(x: Float[Array, "B K C H"], bits: Bits, group: int, along: Along, dtype: Any) -> Packed:
    """Keys or values in few bits; see `quantise`. C is a multiple of the slots in a byte."""
    codes, scale, zero = quantise(x, bits, group, along, dtype)
    return Packed(join_codes(codes, bits), scale, zero, along)


def join_codes(codes: UInt8[Array, "B K C H"], bits: Bits) -> UInt8[Array, "B K CN H"]:
    """Codes of neighbouring slots in one byte."""
    count = 8 // bits
    apart = einops.rearrange(codes, "b k (c n) h -> b k c n h", n=count)
    joined = apart[:, :, :, 0]
    for i in range(1, count):
        joined |= apart[:, :, :, i] << jnp.uint8(bits * i)
    return joined


def split_codes(codes: UInt8[Array, "B K CN H"], bits: Bits) -> UInt8[Array, "B K C H"]:
    """The inverse of `join_codes`."""
    mask = jnp.uint8(2**bits - 1)
    apart = jnp.stack([(codes >> jnp.uint8(shift)) & mask for shift in range(0, 8, bits)], axis=3)
    return einops.rearrange(apart, "b k c n h -> b k (c n) h")


def unpack(packed: Packed, bits: Bits) -> Float[Array, "B K C H"]:
    """The numbers again, in float32."""
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
    """How many blocks of how many slots: whole groups, up to `BLOCK` slots, that divide a cache of `size`."""
    groups = size // group
    most = max(BLOCK // group, 1)
    count = next(n for n in range(min(most, groups), 0, -1) if groups % n == 0)
    return groups // count, count * group


def set_codes(
    joined: UInt8[Array, "B K CN H"], codes: UInt8[Array, "B K H"], slot: Int[Array, "B K"], bits: Bits
) -> UInt8[Array, "B K CN H"]:
    """Bytes with one slot of each head set anew; slots past the last are not set."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
    at = rows[:, None], heads[None, :], slot // (8 // bits)
    shift = (slot % (8 // bits) * bits).astype(jnp.uint8)[..., None]
    others = joined.at[at].get(mode="clip") & ~(jnp.uint8(2**bits - 1) << shift)
    return joined.at[at].set(others | (codes << shift), mode="drop")


def set_codes_run(
    joined: UInt8[Array, "B K CN H"],
    codes: UInt8[Array, "B K W H"],
    slot: Int[Array, "B K W"],
    mine: Bool[Array, "B K W"],
    bits: Bits,
) -> UInt8[Array, "B K CN H"]:
    """Bytes with slots that follow one another, from the first of a byte on, set anew where they are `mine`."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape[:2])
    at = rows[:, None, None], heads[None, :, None], slot[:, :, :: 8 // bits] // (8 // bits)
    old = split_codes(joined.at[at].get(mode="clip"), bits)
    return joined.at[at].set(join_codes(jnp.where(mine[..., None], codes, old), bits), mode="drop")


def put(
    packed: Packed, x: Float[Array, "B K H"], slot: Int[Array, "B K"], bits: Bits, group: int, dtype: Any
) -> Packed:
    """One slot of each head set anew, in groups along channels; slots past the last are not set."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
    at = rows[:, None], heads[None, :]
    codes, scale, zero = quantise(x[:, :, None], bits, group, "channels", dtype)
    # Number by number, since the compiler would lay out scales anew for whole columns.
    each = (*(y[..., None] for y in at), jnp.arange(scale.shape[2], dtype=jnp.int32), slot[..., None])
    return Packed(
        codes=set_codes(packed.codes, codes[:, :, 0], slot, bits),
        scale=packed.scale.at[each].set(scale[..., 0], mode="drop"),
        zero=packed.zero.at[each].set(zero[..., 0], mode="drop"),
        along="channels",
    )


def put_run(
    packed: Packed,
    x: Float[Array, "B K W H"],
    start: Int[Array, "B K"],
    stop: Int[Array, "B K"],
    bits: Bits,
    group: int,
    dtype: Any,
) -> Packed:
    """Slots from `start` up to `stop` of each head set anew.

    Args:
        x: numbers of the slots from the one that begins the byte of `start` on; W is a multiple of the slots in a byte, and of those in a
            group, of which `start` and `stop` are multiples too where groups run along slots.
    """
    count, width = 8 // bits, x.shape[2]
    rows, heads = (jnp.arange(n, dtype=jnp.int32)[:, None, None] for n in start.shape)
    heads = heads[:, 0]
    slot = (start // count * count)[..., None] + jnp.arange(width, dtype=jnp.int32)
    mine = (slot >= start[..., None]) & (slot < stop[..., None])
    codes, scale, zero = quantise(x, bits, group, packed.along, dtype)
    if packed.along == "slots":
        end = packed.scale.shape[2]
        which = (
            rows,
            heads,
            jnp.where(mine, slot // group, end)[:, :, ::group],
        )  # past the last, hence dropped, where none is
    else:
        end, groups = packed.scale.shape[3], jnp.arange(scale.shape[2], dtype=jnp.int32)[:, None]
        which = rows[..., None], heads[..., None], groups, jnp.where(mine, slot, end)[:, :, None]
    return Packed(
        codes=set_codes_run(packed.codes, codes, slot, mine, bits),
        scale=packed.scale.at[which].set(scale, mode="drop"),
        zero=packed.zero.at[which].set(zero, mode="drop"),
        along=packed.along,
    )
