"""Decode attention in plain XLA."""

import math

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED
from ..rotary import DeferredRope, heads_of, parts_of, rotate_halves
from .packed import Bits, blocks, unpack
from .types import Attended, PackedSlots, Rotation


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    probs: bool = False,
) -> Attended:
    """Softmax attention of rotated queries over cache slots; see the public function."""
    q = heads_of(q) if rotation is None else rotation.queries(parts_of(q)[0])
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    live = weight > 0
    keys = k if rotation is None else _rotated(k, rotation)
    logits = jnp.einsum("bkgh,bkch->bkgc", grouped, keys, preferred_element_type=jnp.float32) * scale
    bias = jnp.log(jnp.where(live, weight, 1.0))
    logits = jnp.where(live[:, :, None], logits + bias[:, :, None], MASKED)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    unnormalised = jnp.where(live[:, :, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    share = unnormalised / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bkgc,bkch->bkgh", share.astype(v.dtype), values, preferred_element_type=jnp.float32)
    logsumexp = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return Attended(
        out.reshape(batch, heads, dim).astype(q.dtype),
        logsumexp.reshape(batch, heads),
        jnp.mean(share, axis=2) if probs else None,
    )


def _rotated(k: Float[Array, "B K C H"], rotation: Rotation) -> Float[Array, "B K C H"]:
    cos, sin = (jnp.take(table, rotation.place, axis=0, mode="clip") for table in rotation.tables())
    return rotate_halves(k, cos, sin)


def ragged_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S H"],
    v: Float[Array, "B S H"],
    start: Int[Array, "B K"],
    stop: Int[Array, "B K"],
    *,
    scale: float,
    visible: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B N H"]:
    """Softmax attention over a store of S slots, of which each KV head has a segment of its own.

    Query head n reads the slots from `start` up to `stop` of KV head n // (N / K). The store is read once, whatever the sizes of
    the segments: nothing is padded to the longest. Each slot meets the queries of all heads and those of other heads are
    masked, so there is K times the arithmetic of the attention proper, which on a GPU or TPU takes less time than the reading.

    Args:
        q: queries, rotated.
        k, v: the store, keys rotated. What is in no segment, NaN included, cannot reach the output.
        start, stop: each KV head's segment.
        scale: factor on the logits, usually H ** -0.5.
        visible: slots that may be attended to at all; None for all of them.

    Returns:
        The attended values in the dtype of `q`; zeros for a head that has nothing to attend to.
    """
    return partial_ragged_attention(q, k, v, start, stop, scale=scale, visible=visible)[0]


def partial_ragged_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B S H"],
    v: Float[Array, "B S H"],
    start: Int[Array, "B K"],
    stop: Int[Array, "B K"],
    *,
    scale: float,
    visible: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """`ragged_attention` over a part of the store, with what is needed to put parts together.

    Args:
        q, k, v, start, stop, scale, visible: as for `ragged_attention`.

    Returns:
        The attended values, and the logarithms of the sums of exponentials, -inf for a head that has nothing to attend to.
    """
    batch, heads, dim = q.shape
    kv_heads = start.shape[1]
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    own = (slots >= start[..., None]) & (slots < stop[..., None])  # [B, K, S]
    live = jnp.any(own, axis=1) if visible is None else jnp.any(own, axis=1) & visible
    own &= live[:, None]

    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("bkgh,bsh->bkgs", grouped, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(own[:, :, None], logits, MASKED)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(own[:, :, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bkgs,bsh->bkgh", probs.astype(v.dtype), values, preferred_element_type=jnp.float32)
    logsumexp = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return out.reshape(batch, heads, dim).astype(q.dtype), logsumexp.reshape(batch, heads)


def packed_decode_attention(
    q: Float[Array, "B N H"], slots: PackedSlots, visible: Bool[Array, "B K C"], *, bits: Bits, scale: float
) -> Float[Array, "B N H"]:
    """Softmax attention over packed slots, of which a block at a time is unpacked; see the public function."""
    packed, latest, late = packed_and_latest(slots, visible)
    return partial_packed_attention(q, slots, packed, latest, late, bits=bits, scale=scale)[0]


def packed_and_latest(
    slots: PackedSlots, visible: Bool[Array, "B K C"]
) -> tuple[Bool[Array, "B K C"], Int[Array, "B K E"], Bool[Array, "B K E"]]:
    """What `partial_packed_attention` takes: packed slots that count, the latest slots, and which of these count."""
    latest = _latest(slots)
    late = jnp.take_along_axis(visible, jnp.minimum(latest, visible.shape[-1] - 1), axis=2)
    return visible & (jnp.arange(visible.shape[-1], dtype=jnp.int32) < latest[..., :1]), latest, late


def _latest(slots: PackedSlots) -> Int[Array, "B K E"]:
    """Slots from the first on whose value is exact, as many as there are exact values."""
    recent = slots.v_recent.shape[2]
    return jnp.maximum(slots.next - recent, 0)[..., None] + jnp.arange(recent, dtype=jnp.int32)


def partial_packed_attention(
    q: Float[Array, "B N H"],
    slots: PackedSlots,
    visible: Bool[Array, "B K C"],
    places: Int[Array, "B K E"],
    late: Bool[Array, "B K E"],
    *,
    bits: Bits,
    scale: float,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Softmax attention over a part of the packed slots, such as a device has.

    Args:
        slots: of keys and values in few bits, the part's.
        visible: packed slots of the part that count, see `packed_and_latest`.
        places: where the latest slots are in the part; beyond its end those that are elsewhere.
        late: which of the latest count, wherever they are.

    Returns:
        The attended values, and the logarithms of the sums of exponentials, -inf where nothing counts.
    """
    _, kv_heads, size = visible.shape
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=kv_heads).astype(jnp.float32)
    count, block = blocks(size, math.lcm(size // slots.k.scale.shape[2], 8 // bits))

    def products(keys: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkgh,bkch->bkgc", grouped, keys.astype(jnp.float32)) * scale

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        new = products(unpack(slots.k.part(i * block, block, bits), bits))
        return jax.lax.dynamic_update_slice_in_dim(logits, new, i * block, axis=3)

    logits = jax.lax.fori_loop(0, count, write, jnp.zeros((*grouped.shape[:3], size), jnp.float32))

    # The latest R + 1 slots apart: their values are exact, and the keys of those that are not packed yet.
    latest = _latest(slots)

    def among_latest(x: Float[Array, "B K G C"]) -> Float[Array, "B K G E"]:
        """The latest slots' part, number by number: for slices a compiler would lay out all of it anew."""
        rows, heads, others = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in x.shape[:3]))
        return x.at[rows[..., None], heads[..., None], others[..., None], places[:, :, None]].get(mode="clip")

    def at_places(recent: Float[Array, "B K P H"]) -> Float[Array, "B K E H"]:
        return jnp.take_along_axis(recent, latest[..., None] % recent.shape[2], axis=2)

    exact = (latest >= slots.k_packed[..., None])[:, :, None]
    late_visible = (late & (latest < slots.next[..., None]) & (places < size))[:, :, None]
    late_logits = jnp.where(exact, products(at_places(slots.k_recent)), among_latest(logits))
    late_logits = jnp.where(late_visible, late_logits, MASKED)
    packed = visible[:, :, None]
    logits = jnp.where(packed, logits, MASKED)

    highest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.max(late_logits, axis=-1, keepdims=True))
    share = jnp.where(packed, jnp.exp(logits - highest), 0.0)
    late_share = jnp.where(late_visible, jnp.exp(late_logits - highest), 0.0)
    total = jnp.sum(share, axis=-1, keepdims=True) + jnp.sum(late_share, axis=-1, keepdims=True)

    def add(i: Int[Array, ""], out: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
        values = unpack(slots.v.part(i * block, block, bits), bits)
        weights, valid = (jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (share, packed))
        values = jnp.where(jnp.swapaxes(valid, 2, 3), values, 0.0)
        return out + jnp.einsum("bkgc,bkch->bkgh", weights, values)

    late_values = jnp.where(jnp.swapaxes(late_visible, 2, 3), at_places(slots.v_recent).astype(jnp.float32), 0.0)
    out = jax.lax.fori_loop(0, count, add, jnp.einsum("bkgr,bkrh->bkgh", late_share, late_values))
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    logsumexp = jnp.where(total > 0, highest + jnp.log(total), -jnp.inf)
    return (
        einops.rearrange(out, "b k g h -> b (k g) h").astype(q.dtype),
        einops.rearrange(logsumexp, "b k g 1 -> b (k g)"),
    )
