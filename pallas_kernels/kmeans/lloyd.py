"""Lloyd's iterations, given functions that find the nearest centroids and sum their tokens. All k-means implementations
use it.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Distance = Literal["cosine", "l2", "ip"]
"""How to find the nearest centroid: largest cosine, smallest Euclidean distance, or largest inner product."""

Assign = Callable[[Float[Array, "B K M H"], Float[Array, "B K M"] | None], Int[Array, "B K T"]]
"""Function of centroids and biases, as for `nearest`, that returns each token's centroid."""


class Members(NamedTuple):
    """The tokens of each cluster.

    Attributes:
        labels: each token's cluster, M for tokens that take no part.
        sums: sum of each cluster's tokens, in float32, in P parts that have to be added.
        counts: number of each cluster's tokens, in float32.
    """

    labels: Int[Array, "B K T"]
    sums: Float[Array, "B K P M H"]
    counts: Float[Array, "B K M"]


Total = Callable[[Int[Array, "B K T"], Members], Members]
"""Function of the new labels and the previous `Members` that returns the new `Members`."""


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
    parts: int = 1,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Return centroids and labels after `iterations`; see the public function.

    Args:
        mask, init, clusters, iterations, distance: as for the public function.
        assign: finds each token's nearest centroid.
        total: sums the tokens of each cluster.
        dtype: dtype to which centroids are rounded for `assign`.
        parts: number of parts of `Members.sums`.
    """
    batch, heads, size, _ = init.shape
    used = (jnp.arange(size, dtype=jnp.int32) < clusters[:, None])[:, None]

    def nearest(centroids: Array) -> Int[Array, "B K T"]:
        if distance == "cosine":  # a token's length does not change which centroid is nearest
            norm = jnp.linalg.norm(centroids, axis=-1, keepdims=True)
            centroids = centroids / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
        centroids, bias = centroids.astype(dtype), None
        if distance == "l2":
            bias = jnp.where(used, -0.5 * jnp.sum(centroids.astype(jnp.float32) ** 2, axis=-1), -jnp.inf)
        else:  # adding a bias costs as much as comparing, so unused centroids are copies of the first
            centroids = jnp.where(used[..., None], centroids, centroids[:, :, :1])
        labels = assign(centroids, bias)
        labels = jnp.where(labels < clusters[:, None, None], labels, 0)
        return jnp.where(mask[:, None], labels, size)

    def improve(_: Array, state: tuple[Array, Members]) -> tuple[Array, Members]:
        centroids, members = state
        members = total(nearest(centroids), members)
        counts = members.counts[..., None]
        means = jnp.sum(members.sums, axis=2) / jnp.maximum(counts, 1.0)
        return jnp.where(counts > 0, means, centroids), members

    nothing = Members(
        labels=jnp.full((batch, heads, mask.shape[1]), size, jnp.int32),
        sums=jnp.zeros((batch, heads, parts, size, init.shape[3]), jnp.float32),
        counts=jnp.zeros(init.shape[:-1], jnp.float32),
    )
    centroids, _ = jax.lax.fori_loop(0, iterations, improve, (init.astype(jnp.float32), nothing))
    return centroids, nearest(centroids)
