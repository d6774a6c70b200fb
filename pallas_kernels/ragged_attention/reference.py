"""Ragged decode attention in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED


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
    batch, heads, dim = q.shape
    kv_heads = start.shape[1]
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    own = (slots >= start[..., None]) & (slots < stop[..., None])  # [B, K, S]
    live = jnp.any(own, axis=1) if visible is None else jnp.any(own, axis=1) & visible
    own &= live[:, None]

    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("bkgh,bsh->bkgs", grouped, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(own[:, :, None], logits, MASKED)
    weights = jnp.where(own[:, :, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    probs = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bkgs,bsh->bkgh", probs.astype(v.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, dim).astype(q.dtype)
