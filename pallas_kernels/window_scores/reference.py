"""Observation-window scores in plain XLA."""

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
) -> Float[Array, "B K T"]:
    """Causal softmax of each row's last `window` queries over its prompt, averaged over those queries and the group.

    The observation window of SnapKV (Li et al. 2024, section 3), used by ChunkKV and TreeKV too. A row shorter than the window
    is averaged over the queries that it has.

    Args:
        q, k: rotated queries and keys of a right-padded prompt.
        lengths: tokens in each row.
        window: number of observing queries.
        scale: factor on the logits.
        sliding_window: attention window of the layer in tokens, if it has one.

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
    distance = q_pos[:, :, None] - jnp.arange(length, dtype=jnp.int32)
    visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)  # [B, w, T]
    logits = jnp.einsum("bwkgh,btkh->bkgwt", rows, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(visible[:, None, None], logits, MASKED)
    weights = jnp.where(visible[:, None, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    observers = jnp.minimum(lengths, window).astype(jnp.float32)
    return jnp.sum(jnp.mean(probs, axis=2), axis=2) / jnp.maximum(observers, 1.0)[:, None, None]
