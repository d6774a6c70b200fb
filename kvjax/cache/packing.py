"""Low-bit codes: numbers rounded to evenly spaced steps between the minimum and maximum of a group, packed into bytes.

This is KIVI's scheme (Liu et al. 2024, section 3.1): code = round((x - zero) / scale), with zero = minimum of the group
and scale = (maximum - minimum) / (2^bits - 1). The error is at most scale / 2, plus the rounding of scale and zero.
"""

import functools
from typing import Any, Self

import einops
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvjax.pallas_kernels.decode_attention.packed import Along as Along
from kvjax.pallas_kernels.decode_attention.packed import Bits as Bits
from kvjax.pallas_kernels.decode_attention.packed import Packed as Packed
from kvjax.pallas_kernels.decode_attention.packed import blocks as blocks
from kvjax.pallas_kernels.decode_attention.packed import bytes_of, words_of
from kvjax.pallas_kernels.decode_attention.packed import part_of_codes as part_of_codes
from kvjax.pallas_kernels.decode_attention.packed import run_bytes as run_bytes
from kvjax.pallas_kernels.decode_attention.packed import run_slots as run_slots
from kvjax.pallas_kernels.decode_attention.packed import split_codes as split_codes
from kvjax.pallas_kernels.decode_attention.packed import unpack as unpack


@flax.struct.dataclass
class PackedCache:
    """A quantised cache with exact latest tokens.

    B rows, K KV heads, C slots, R residual tokens, E = R + 1, H head dim. The state is what the latest query reads: its
    own token and the R before it are exact. Tokens to be packed are packed when the next token comes. The token in slot
    s has its exact key at s mod R, and its exact value at s mod (R + 1), as long as they are residual. Slots below
    `next` are filled.

    Attributes:
        k: rotated keys, valid up to the last multiple of R before the newest token.
        v: values, valid except for the newest one and the R before it.
        k_recent, v_recent: exact keys and values of the latest slots.
        pos, next, seen, slot_shards: as in `LayerCache`. Exact entries are replicated on all devices.
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
        """The state itself, for code that reads the `cache` of a state."""
        return self

    @property
    def slot_axes(self) -> tuple[Any, Any]:
        """Slot axis of each array of keys and values."""
        return self.k.slot_axes, self.v.slot_axes

    @property
    def live(self) -> Bool[Array, "B K C"]:
        """Slots that contain a token."""
        return jnp.arange(self.pos.shape[-1], dtype=jnp.int32) < self.next[..., None]

    @property
    def k_packed(self) -> Int[Array, "B K"]:
        """Number of slots with packed keys."""
        residual = self.k_recent.shape[2]
        return jnp.maximum(self.next - 1, 0) // residual * residual

    @property
    def v_recent_slots(self) -> Int[Array, "B K E"]:
        """Slots of the values at each place of `v_recent`, negative for none."""
        return latest_slots(self.next, self.v_recent.shape[2])


def latest_slots(following: Int[Array, "B K"], places: int) -> Int[Array, "B K E"]:
    """Latest slot at each place of a ring of `places`, negative for none."""
    last = following[..., None] - 1
    return last - (last - jnp.arange(places, dtype=jnp.int32)) % places


def quantise(
    x: Float[Array, "B K C H"], bits: Bits, group: int, along: Along, dtype: Any
) -> tuple[UInt8[Array, "B K C H"], Float[Array, "B K X Y"], Float[Array, "B K X Y"]]:
    """Return codes, one byte each, with their scales and zeros as in `Packed`.

    Args:
        x: keys or values.
        bits: bits per code.
        group: slots or channels of a group, a divisor of C or H.
        along: the axis along which a group runs.
        dtype: dtype of scales and zeros.
    """
    batch, heads, slots, dim = x.shape
    shape = (slots // group, group, dim) if along == "slots" else (slots, dim // group, group)
    axis = 3 if along == "slots" else 4
    groups = x.astype(jnp.float32).reshape(batch, heads, *shape)
    low, high = jnp.min(groups, axis=axis), jnp.max(groups, axis=axis)
    scale = (high - low) / (2**bits - 1)
    # Codes are computed from the stored, rounded scale and zero. In a group of equal numbers all codes are 0.
    scale, zero = jnp.where(scale > 0, scale, 1.0).astype(dtype), low.astype(dtype)
    wide_scale, wide_zero = (jnp.expand_dims(y.astype(jnp.float32), axis) for y in (scale, zero))
    codes = jnp.clip(jnp.round((groups - wide_zero) / wide_scale), 0, 2**bits - 1)
    if along == "channels":
        scale, zero = (jnp.swapaxes(y, 2, 3) for y in (scale, zero))
    return codes.astype(jnp.uint8).reshape(x.shape), scale, zero


def pack(x: Float[Array, "B K C H"], bits: Bits, group: int, along: Along, dtype: Any) -> Packed:
    """Quantise keys or values, see `quantise`. C is whole runs."""
    codes, scale, zero = quantise(x, bits, group, along, dtype)
    return Packed(join_codes(codes, bits), scale, zero, along)


def join_codes(codes: UInt8[Array, "B K C H"], bits: Bits) -> UInt8[Array, "B K CN H"]:
    """Join the codes of neighbouring slots in shared bytes, the inverse of `split_codes`. C is whole runs."""
    wide = jnp.uint8 if run_bytes(bits) == 1 else jnp.uint32
    apart = einops.rearrange(codes, "b k (r n) h -> n b k r h", n=run_slots(bits)).astype(wide)
    words = functools.reduce(jnp.bitwise_or, (each << wide(bits * i) for i, each in enumerate(apart)))
    return bytes_of(words, bits)


def set_codes(
    joined: UInt8[Array, "B K CN H"], codes: UInt8[Array, "B K H"], slot: Int[Array, "B K"], bits: Bits
) -> UInt8[Array, "B K CN H"]:
    """Set the codes of one slot of each head. Slots out of bounds are dropped."""
    at = _bytes_at(slot[..., None] // run_slots(bits), bits)
    words = words_of(joined.at[at].get(mode="clip"), bits)
    shift = (slot % run_slots(bits) * bits).astype(words.dtype)[..., None, None]
    others = words & ~(words.dtype.type(2**bits - 1) << shift)
    return joined.at[at].set(bytes_of(others | (codes[:, :, None].astype(words.dtype) << shift), bits), mode="drop")


def set_codes_run(
    joined: UInt8[Array, "B K CN H"],
    codes: UInt8[Array, "B K W H"],
    slot: Int[Array, "B K W"],
    mine: Bool[Array, "B K W"],
    bits: Bits,
) -> UInt8[Array, "B K CN H"]:
    """Set the codes of consecutive slots, beginning with the first slot of a run, where they are `mine`."""
    at = _bytes_at(slot[:, :, :: run_slots(bits)] // run_slots(bits), bits)
    old = split_codes(joined.at[at].get(mode="clip"), bits)
    return joined.at[at].set(join_codes(jnp.where(mine[..., None], codes, old), bits), mode="drop")


def _bytes_at(run: Int[Array, "B K R"], bits: Bits) -> tuple[Int[Array, "..."], ...]:
    """Return the index of the bytes of runs in an array of codes."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in run.shape[:2])
    number = run_bytes(bits)
    byte = run[..., None] * number + jnp.arange(number, dtype=jnp.int32)
    return rows[:, None, None], heads[None, :, None], byte.reshape(*run.shape[:2], -1)


def put(
    packed: Packed, x: Float[Array, "B K H"], slot: Int[Array, "B K"], bits: Bits, group: int, dtype: Any
) -> Packed:
    """Set one slot of each head, in groups along channels. Slots out of bounds are dropped."""
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in slot.shape)
    at = rows[:, None], heads[None, :]
    codes, scale, zero = quantise(x[:, :, None], bits, group, "channels", dtype)
    # Scalar updates, because XLA would change the layout of scales for whole columns.
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
    """Set slots `start` to `stop` of each head.

    Args:
        packed: the codes.
        x: numbers from the first slot in the run of `start` on (`run_slots`). W is whole runs. For groups along slots,
            W, `start` and `stop` are multiples of the group.
        start, stop: first slot, and the slot after the last.
        bits: bits per code.
        group: slots or channels of a group.
        dtype: dtype of scales and zeros.
    """
    count, width = run_slots(bits), x.shape[2]
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
        )  # out of bounds where there is none: dropped
    else:
        end, groups = packed.scale.shape[3], jnp.arange(scale.shape[2], dtype=jnp.int32)[:, None]
        which = rows[..., None], heads[..., None], groups, jnp.where(mine, slot, end)[:, :, None]
    return Packed(
        codes=set_codes_run(packed.codes, codes, slot, mine, bits),
        scale=packed.scale.at[which].set(scale, mode="drop"),
        zero=packed.zero.at[which].set(zero, mode="drop"),
        along=packed.along,
    )
