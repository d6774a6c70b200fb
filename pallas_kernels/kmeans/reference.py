"""k-means in plain XLA, in one pass over the tokens an iteration and with memory that grows with T, not with T × M.

Sums are matrix products with one-hot labels, which on any device add up in a fixed order: equal inputs give equal clusters.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED

BLOCK = 512
"""Tokens assigned at a time."""

Distance = Literal["cosine", "l2", "ip"]
"""What "nearest" means: largest cosine, least Euclidean distance, or largest inner product."""


def kmeans(
    x: Float[Array, "B K T H"],
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    *,
    iterations: int,
    distance: Distance = "cosine",
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Lloyd's algorithm with a fixed number of iterations (ClusterKV, Liu et al. 2024, section III-B).

    An iteration assigns every token to its nearest centroid, of equally near ones the first, and moves each centroid to the
    mean of its tokens as they are, not normalised; a centroid without tokens stays. A last assignment follows.

    Args:
        x: what is clustered, for each of B rows and K heads.
        mask: which of the T tokens take part; the others may hold anything.
        init: centroids to start from.
        clusters: how many of the M centroids a row uses; the others stay as they are and get no tokens.

    Returns:
        Centroids in float32, and each token's centroid, M for tokens that take no part.
    """
    batch, heads, tokens, dim = x.shape
    size = init.shape[2]
    used = jnp.arange(size, dtype=jnp.int32) < clusters[:, None]
    block = min(BLOCK, tokens)
    pad = -tokens % block
    x = jnp.pad(jnp.where(mask[:, None, :, None], x.astype(jnp.float32), 0.0), ((0, 0), (0, 0), (0, pad), (0, 0)))
    blocks = jnp.moveaxis(x.reshape(batch, heads, -1, block, dim), 2, 0)  # [T / block, B, K, block, H]
    masks = jnp.moveaxis(jnp.pad(mask, ((0, 0), (0, pad))).reshape(batch, -1, block), 1, 0)

    def nearest(centroids: Array, x: Array) -> Int[Array, "B K T"]:
        scores = jnp.einsum("bkth,bkmh->bktm", x, _directions(centroids, distance), precision="highest")
        if distance == "l2":
            scores -= 0.5 * jnp.sum(centroids**2, axis=-1)[:, :, None]
        return jnp.argmax(jnp.where(used[:, None, None], scores, MASKED), axis=-1)

    def improve(_: Array, centroids: Array) -> Array:
        def fold(total: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            x, mask = block
            labels = jnp.where(mask[:, None], nearest(centroids, x), size)
            member = jax.nn.one_hot(labels, size, dtype=jnp.float32)  # zeros for what takes no part
            sums = jnp.einsum("bktm,bkth->bkmh", member, x, precision="highest")
            return (total[0] + sums, total[1] + jnp.sum(member, axis=2)), None

        start = jnp.zeros_like(centroids), jnp.zeros(centroids.shape[:-1])
        sums, counts = jax.lax.scan(fold, start, (blocks, masks))[0]
        return jnp.where(counts[..., None] > 0, sums / jnp.maximum(counts, 1.0)[..., None], centroids)

    centroids = jax.lax.fori_loop(0, iterations, improve, init.astype(jnp.float32))
    labels = jax.lax.map(lambda x: nearest(centroids, x), blocks)
    labels = jnp.moveaxis(labels, 0, 2).reshape(batch, heads, -1)[:, :, :tokens]
    return centroids, jnp.where(mask[:, None], labels, size).astype(jnp.int32)


def _directions(centroids: Float[Array, "B K M H"], distance: Distance) -> Float[Array, "B K M H"]:
    """What a token's inner product is taken with; a token's own length does not change which centroid is nearest."""
    if distance != "cosine":
        return centroids
    norm = jnp.linalg.norm(centroids, axis=-1, keepdims=True)
    return centroids / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
