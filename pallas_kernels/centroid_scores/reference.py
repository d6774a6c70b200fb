"""The same, readably."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..rotary import DeferredRope, heads_of


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope, centroids: Float[Array, "B K M H"]
) -> Float[Array, "B K G M"]:
    """Products, exactly."""
    batch, kv_heads, _, dim = centroids.shape
    q = heads_of(q).reshape(batch, kv_heads, -1, dim).astype(jnp.float32)
    return jnp.sum(q[:, :, :, None] * centroids[:, :, None], axis=-1)
