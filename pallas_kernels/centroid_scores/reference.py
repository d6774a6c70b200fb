"""The same, readably."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def centroid_scores(q: Float[Array, "B N H"], centroids: Float[Array, "B K M H"]) -> Float[Array, "B K G M"]:
    """Products, exactly."""
    batch, kv_heads, _, dim = centroids.shape
    q = q.reshape(batch, kv_heads, -1, dim).astype(jnp.float32)
    return jnp.sum(q[:, :, :, None] * centroids[:, :, None], axis=-1)
