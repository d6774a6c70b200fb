"""Lloyd's iterations, whoever finds the nearest centroids and adds up their tokens."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Distance = Literal["cosine", "l2", "ip"]
"""What "nearest" means: largest cosine, least Euclidean distance, or largest inner product."""

Assign = Callable[[Float[Array, "B K M H"], Float[Array, "B K M"]], Int[Array, "B K T"]]
"""From centroids and biases, as `nearest` takes them, to each token's centroid."""

Total = Callable[[Int[Array, "B K T"]], tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]]
"""From each token's centroid, M for those that take no part, to the sum over its tokens and their number, in float32."""


def lloyd(
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    assign: Assign,
    total: Total,
    *,
    dtype: Any,
    iterations: int,
    distance: Distance,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Centroids and labels after `iterations`; see the public function.

    Args:
        dtype: what centroids are rounded to for `assign`.
    """
    size = init.shape[2]
    used = (jnp.arange(size, dtype=jnp.int32) < clusters[:, None])[:, None]

    def nearest(centroids: Array) -> Int[Array, "B K T"]:
        if distance == "cosine":  # a token's own length does not change which centroid is nearest
            norm = jnp.linalg.norm(centroids, axis=-1, keepdims=True)
            centroids = centroids / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        centroids = centroids.astype(dtype)
        bias = jnp.zeros(centroids.shape[:-1], jnp.float32)
        if distance == "l2":
            bias = -0.5 * jnp.sum(centroids.astype(jnp.float32) ** 2, axis=-1)
        return jnp.where(mask[:, None], assign(centroids, jnp.where(used, bias, -jnp.inf)), size)

    def improve(_: Array, centroids: Array) -> Array:
        sums, counts = total(nearest(centroids))
        return jnp.where(counts[..., None] > 0, sums / jnp.maximum(counts, 1.0)[..., None], centroids)

    centroids = jax.lax.fori_loop(0, iterations, improve, init.astype(jnp.float32))
    return centroids, nearest(centroids)
