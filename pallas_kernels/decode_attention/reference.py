"""XLA reference of `decode_attention` and `packed_decode_attention`, and attention variants that have no kernel.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must match it up to rounding.
"""

import math

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED
from ..rotary import DeferredRope, heads_of, parts_of, rotate_halves
from ..sinks import with_sinks
from .packed import Bits, blocks, run_slots, unpack
from .types import Attended, Factors, PackedSlots, Rotation


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    factors: Factors | None = None,
    probs: bool = False,
    sinks: Float[Array, " N"] | None = None,
) -> Attended:
    """Softmax attention over cache slots; see the public function."""
    if factors is not None:  # exact: 8-bit floats are also numbers of the queries' dtype
        k, v = (x.astype(parts_of(q)[0].dtype) for x in (k, v))
    q = heads_of(q) if rotation is None else rotation.queries(parts_of(q)[0])
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    live = weight > 0
    keys = k if rotation is None else _rotated(k, rotation)
    logits = jnp.einsum("bkgh,bkch->bkgc", grouped, keys, preferred_element_type=jnp.float32) * scale
    if factors is not None:
        logits *= factors.k[:, :, None]
    bias = jnp.log(jnp.where(live, weight, 1.0))
    logits = jnp.where(live[:, :, None], logits + bias[:, :, None], MASKED)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    unnormalised = jnp.where(live[:, :, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    share = unnormalised / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    weights = share if factors is None else share * jnp.where(live, factors.v, 0.0)[:, :, None]
    out = jnp.einsum("bkgc,bkch->bkgh", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    # The logarithm of 0 has no derivative, and `sinks` give the log-sum-exp one.
    logsumexp = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    if sinks is not None:
        sinks = sinks.reshape(grouped.shape[1:3])
        out, share = (with_sinks(x, logsumexp[..., 0], sinks) for x in (out, share))
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
    """Softmax attention over a store of S slots in which each KV head has its own segment.

    Query head n reads slots `start` to `stop` of KV head n // (N / K). The store is read once and never padded,
    whatever the lengths of the segments. Every slot is multiplied with the queries of all heads, and other heads' slots
    are masked. This is K times the necessary arithmetic, which takes less time on a GPU or TPU than reading the store.

    Args:
        q: queries, rotated.
        k, v: the store; keys are rotated. Slots outside all segments, even with NaN, do not reach the output.
        start, stop: segment of each KV head.
        scale: factor on the logits, usually H ** -0.5.
        visible: slots that may be attended to; None for all slots.

    Returns:
        The attended values in the dtype of `q`; zeros for a head that has nothing to attend to.

    Example:
        >>> q, store = jax.random.normal(jax.random.key(0), (1, 2, 4)), jax.random.normal(jax.random.key(1), (1, 8, 4))
        >>> start, stop = jnp.asarray([[0, 2]]), jnp.asarray([[2, 8]])  # two heads, with 2 and 6 slots
        >>> kvjax.pallas_kernels.ragged_attention(q, store, store, start, stop, scale=0.5).shape
        (1, 2, 4)
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
    """Compute `ragged_attention` over a part of the store, with the log-sum-exp needed to combine parts.

    Args:
        q, k, v, start, stop, scale, visible: as for `ragged_attention`.

    Returns:
        The attended values, and the log-sum-exp of the logits, -inf for a head that has nothing to attend to.

    Example:
        >>> q, store = jax.random.normal(jax.random.key(0), (1, 2, 4)), jax.random.normal(jax.random.key(1), (1, 8, 4))
        >>> start, stop = jnp.asarray([[0, 2]]), jnp.asarray([[0, 8]])  # the first head has no slot here
        >>> out, logsumexp = kvjax.pallas_kernels.partial_ragged_attention(q, store, store, start, stop, scale=0.5)
        >>> jnp.isfinite(logsumexp).tolist()
        [[False, True]]
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
    """Softmax attention over quantised slots, dequantised block by block; see the public function."""
    packed, latest, late = packed_and_latest(slots, visible)
    return partial_packed_attention(q, slots, packed, latest, late, bits=bits, scale=scale)[0]


def packed_and_latest(
    slots: PackedSlots, visible: Bool[Array, "B K C"]
) -> tuple[Bool[Array, "B K C"], Int[Array, "B K E"], Bool[Array, "B K E"]]:
    """Split the visible slots into the arguments of `partial_packed_attention`.

    Args:
        slots: quantised keys and values.
        visible: which of the filled slots are attended to.

    Returns:
        Which quantised slots are attended to, the indices of the E latest slots, and which of those are attended to.

    Example:
        >>> state, _ = kvjax.KIVI(bits=8, group=2, residual=2).layer(spec).prefill(prompt, {})  # 8-bit codes
        >>> recent = state.k_recent, state.v_recent
        >>> slots = kvjax.pallas_kernels.PackedSlots(state.k, state.v, *recent, state.k_packed, state.next)
        >>> packed, latest, late = kvjax.pallas_kernels.packed_and_latest(slots, state.live)
        >>> np.flatnonzero(packed).tolist(), latest[late].tolist()  # slots
        ([0, 1, 2], [3, 4, 5])
    """
    latest = _latest(slots)
    late = jnp.take_along_axis(visible, jnp.minimum(latest, visible.shape[-1] - 1), axis=2)
    return visible & (jnp.arange(visible.shape[-1], dtype=jnp.int32) < latest[..., :1]), latest, late


def _latest(slots: PackedSlots) -> Int[Array, "B K E"]:
    """Return the indices of the E slots from the first one with an unquantised value on."""
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
    """Softmax attention over a part of the quantised slots, such as one device's shard.

    Args:
        q: queries, rotated.
        slots: quantised keys and values of the part, and the latest slots.
        visible: quantised slots of the part that are attended to; see `packed_and_latest`.
        places: index of each of the latest slots in the part; out of range if it is in another part.
        late: which of the latest slots are attended to, in whatever part they are.
        bits: bits per code.
        scale: factor on the logits, usually H ** -0.5.

    Returns:
        The attended values, and the log-sum-exp of the logits, -inf for a head that has nothing to attend to.

    Example:
        >>> state, _ = kvjax.KIVI(bits=8, group=2, residual=2).layer(spec).prefill(prompt, {})  # 8-bit codes
        >>> recent = state.k_recent, state.v_recent
        >>> slots = kvjax.pallas_kernels.PackedSlots(state.k, state.v, *recent, state.k_packed, state.next)
        >>> parts = kvjax.pallas_kernels.packed_and_latest(slots, state.live)
        >>> out, logsumexp = kvjax.pallas_kernels.partial_packed_attention(token.q, slots, *parts, bits=8, scale=0.5)
        >>> out.shape, logsumexp.shape
        ((1, 2, 4), (1, 2))
    """
    _, kv_heads, size = visible.shape
    grouped = einops.rearrange(q, "b (k g) h -> b k g h", k=kv_heads).astype(jnp.float32)
    count, block = blocks(size, math.lcm(size // slots.k.scale.shape[2], run_slots(bits)))

    def products(keys: Float[Array, "B K C H"]) -> Float[Array, "B K G C"]:
        return jnp.einsum("bkgh,bkch->bkgc", grouped, keys.astype(jnp.float32)) * scale

    def write(i: Int[Array, ""], logits: Float[Array, "B K G C"]) -> Float[Array, "B K G C"]:
        new = products(unpack(slots.k.part(i * block, block, bits), bits))
        return jax.lax.dynamic_update_slice_in_dim(logits, new, i * block, axis=3)

    logits = jax.lax.fori_loop(0, count, write, jnp.zeros((*grouped.shape[:3], size), jnp.float32))

    # The latest slots are separate: their values are unquantised, and so are the keys that are not yet quantised.
    latest = _latest(slots)

    def among_latest(x: Float[Array, "B K G C"]) -> Float[Array, "B K G E"]:
        """Gather the latest slots element by element. Slices would make the compiler change the layout of the whole
        array.
        """
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
