"""Decode attention in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED
from ..rotary import DeferredRope, heads_of, parts_of, rotate_halves
from .types import Attended, Rotation


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
