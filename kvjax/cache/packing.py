"""Numbers in a few bits: rounded to evenly spaced levels between the least and the greatest of a group, and packed into bytes.

This is KIVI's scheme (Liu et al. 2024, section 3.1): code = round((x - zero) / scale), with zero the least of a group and scale =
(greatest - least) / (2^bits - 1), so that no number is off by more than scale / 2 (but for the rounding of scale and zero).
"""

from typing import Any, Self

import einops
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvjax.pallas_kernels.decode_attention.packed import Along as Along
from kvjax.pallas_kernels.decode_attention.packed import Bits as Bits
from kvjax.pallas_kernels.decode_attention.packed import Packed as Packed
from kvjax.pallas_kernels.decode_attention.packed import blocks as blocks
from kvjax.pallas_kernels.decode_attention.packed import split_codes as split_codes
from kvjax.pallas_kernels.decode_attention.packed import unpack as unpack


@flax.struct.dataclass
class PackedCache:
    """A cache in a few bits, but for its latest tokens. B rows, K KV heads, C slots, R residual tokens, E = R + 1, H head dim.

    It is as the latest query reads it, which has its own token and the R before it exact: what is to be packed then is packed when
    the next token comes. The token in slot s has its key exact at place s mod R, and its value at s mod (R + 1), as long as they are
    residual; slots below `next` are filled.

    Attributes:
        k: rotated keys; those up to the last multiple of R before the newest token count.
        v: values; those but for the newest one and the R before it count.
        k_recent, v_recent: exact keys and values of the latest slots.
        pos, next, seen, sharded: as in `LayerCache`. What is exact is on every device.
    """

    k: Packed
    v: Packed
    k_recent: Float[Array, "B K R H"]
    v_recent: Float[Array, "B K E H"]
    pos: Int[Array, "B K C"]
    next: Int[Array, "B K"]
    seen: Int[Array, " B"]
    slot_shards: int = flax.struct.field(pytree_node=False, default=1, kw_only=True)

    @property
    def cache(self) -> Self:
        """Itself, as of a `LayerCache`."""
        return self

    @property
    def slot_axes(self) -> tuple[Any, Any]:
        """Along which axis each array of keys and values has slots, or what several of them have together."""
        return self.k.slot_axes, self.v.slot_axes

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Which slots hold something."""
        return jnp.arange(self.pos.shape[-1], dtype=jnp.int32) < self.next[..., None]

    @property
    def k_packed(self) -> Int[Array, "B K"]:
        """How many slots have their keys packed."""
        residual = self.k_recent.shape[2]
        return jnp.maximum(self.next - 1, 0) // residual * residual

    @property
    def v_recent_slots(self) -> Int[Array, "B K E"]:
        """Slots of the values at each place of `v_recent`, negative where there is none."""
        return latest_slots(self.next, self.v_recent.shape[2])


def latest_slots(following: Int[Array, "B K"], places: int) -> Int[Array, "B K E"]:
    """The latest slot that takes each of so many places in turn; negative where there is none."""
    last = following[..., None] - 1
    return last - (last - jnp.arange(places, dtype=jnp.int32)) % places


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
