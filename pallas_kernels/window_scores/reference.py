"""Observation-window scores in plain XLA."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..masking import MASKED


def window_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    window: int,
    scale: float,
    sliding_window: int | None = None,
    kind: Literal["softmax", "logits"] = "softmax",
) -> Float[Array, "B K T"]:
    """How much each row's last `window` queries look at each of its tokens, averaged over those queries and the group.

    The observation window of SnapKV (Li et al. 2024, section 3), used by ChunkKV and TreeKV too. A row shorter than the window
    is averaged over the queries that it has.

    Args:
        q, k: rotated queries and keys of a right-padded prompt.
        lengths: tokens in each row.
        window: number of observing queries.
        scale: factor on the logits.
        sliding_window: attention window of the layer in tokens, if it has one.
        kind: "softmax" averages causal attention probabilities; "logits" averages the bare products q · k · scale of every
            observer with every token, later ones and those outside a sliding window included (ChunkKV as printed).

    Returns:
        Scores in float32, zero in the padding.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q_pos = (
        lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    )  # [B, w], negative where the row is too short
    rows = jnp.take_along_axis(q, jnp.maximum(q_pos, 0)[:, :, None, None], axis=1)
    rows = rows.reshape(batch, window, kv_heads, heads // kv_heads, dim)
    observers = jnp.maximum(jnp.minimum(lengths, window), 1).astype(jnp.float32)[:, None, None]
    if kind == "logits":  # a mean of products is the product with the mean
        observed = jnp.where((q_pos >= 0)[:, :, None, None, None], rows, jnp.zeros((), rows.dtype))
        query = jnp.sum(jnp.mean(observed.astype(jnp.float32), axis=3), axis=1) / observers
        products = jnp.einsum("bkh,btkh->bkt", query, k.astype(jnp.float32)) * scale
        return jnp.where((jnp.arange(length, dtype=jnp.int32) < lengths[:, None])[:, None], products, 0.0)
    distance = q_pos[:, :, None] - jnp.arange(length, dtype=jnp.int32)
    visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)  # [B, w, T]
    logits = jnp.einsum("bwkgh,btkh->bkgwt", rows, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(visible[:, None, None], logits, MASKED)
    weights = jnp.where(visible[:, None, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return jnp.sum(jnp.mean(probs, axis=2), axis=2) / observers
