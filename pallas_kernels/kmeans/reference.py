"""XLA reference of `kmeans`, `nearest` and `newest_duplicate`.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must match it, except where rounding decides. The
memory of `kmeans` grows with T, not with T × M.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..ties import exceeds
from .lloyd import Distance, Members, lloyd
from .types import Nearest

BLOCK = 512
"""Tokens assigned at a time."""

COSINES = 2**22
"""Number of cosines of one sequence in memory at a time: 16 MiB."""


def kmeans(
    x: Float[Array, "B K T H"],
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    *,
    iterations: int,
    distance: Distance,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Lloyd's algorithm, block by block; see the public function."""
    batch, heads, tokens, _ = x.shape
    block = min(BLOCK, tokens)
    pad = ((0, 0), (0, 0), (0, -tokens % block))

    def split(x: Array, fill: int) -> Array:
        """Split into blocks of tokens, [T / block, B, K, block, …]."""
        x = jnp.pad(x, (*pad, *[(0, 0)] * (x.ndim - 3)), constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, heads, -1, block, *x.shape[3:]), 2, 0)

    blocks = split(jnp.where(mask[:, None, :, None], x, jnp.zeros((), x.dtype)), 0)

    def assign(centroids: Array, bias: Array | None) -> Int[Array, "B K T"]:
        labels = jax.lax.map(lambda x: nearest(x, centroids, bias).place, blocks)
        return jnp.moveaxis(labels, 0, 2).reshape(batch, heads, -1)[:, :, :tokens]

    def total(labels: Int[Array, "B K T"], _: Members) -> Members:
        size = init.shape[2]

        def fold(total: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            x, labels = block
            member = jax.nn.one_hot(labels, size, dtype=jnp.float32)  # zeros for masked tokens
            sums = jnp.einsum("bktm,bkth->bkmh", member, x.astype(jnp.float32), precision="highest")
            return (total[0] + sums, total[1] + jnp.sum(member, axis=2)), None

        start = jnp.zeros(init.shape, jnp.float32), jnp.zeros(init.shape[:-1], jnp.float32)
        sums, counts = jax.lax.scan(fold, start, (blocks, split(labels, size)))[0]
        return Members(labels, sums[:, :, None], counts)

    return lloyd(mask, init, clusters, assign, total, dtype=x.dtype, iterations=iterations, distance=distance)


def nearest(
    queries: Float[Array, "*B N H"], keys: Float[Array, "*B M H"], bias: Float[Array, "*B M"] | None = None
) -> Nearest:
    """Find the key with the largest inner product plus bias; see the public function."""
    scores = jnp.einsum("...nh,...mh->...nm", queries, keys, precision="highest", preferred_element_type=jnp.float32)
    if bias is not None:
        scores = jnp.where(bias[..., None, :] > -jnp.inf, scores + bias[..., None, :], -jnp.inf)
    highest = jnp.max(scores, axis=-1)
    return Nearest(highest, jnp.argmax(~exceeds(highest[..., None], scores), axis=-1).astype(jnp.int32))


def inverse_lengths(keys: Float[Array, "*B H"], live: Bool[Array, "*B"]) -> Float[Array, "*B"]:
    """Return one over each key's length, 0 for keys of length 0, and NaN for slots without a key.

    Comparisons with NaN are False, so that slots without a key are no duplicates.
    """
    norm = jnp.linalg.norm(keys.astype(jnp.float32), axis=-1)
    inverse = jnp.where(norm > 0, 1 / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny), 0.0)
    return jnp.where(live, inverse, jnp.nan)


def newest_duplicate(
    keys: Float[Array, "B K T H"], live: Bool[Array, "B K T"], *, threshold: float
) -> Int[Array, "B K T"]:
    """Find the indices of the newest duplicates, for a part of the keys at a time. This avoids a matrix of T × T for
    large T.
    """
    batch, heads, count, _ = keys.shape
    inverse, place = inverse_lengths(keys, live), jnp.arange(count, dtype=jnp.int32)
    size = min(count, max(COSINES // (heads * count), 16))

    def find(start: Int[Array, ""]) -> Int[Array, "B K S"]:
        own = start + jnp.arange(size, dtype=jnp.int32)
        some, scale = (jnp.take(x, own, axis=2, mode="clip") for x in (keys, inverse))
        products = jnp.einsum("bkih,bkth->bkit", some, keys, preferred_element_type=jnp.float32)
        similar = products * scale[..., None] * inverse[:, :, None] > threshold
        return jnp.max(jnp.where(similar & (own[:, None] != place), place, -1), axis=-1)

    found = jax.lax.map(find, jnp.arange(-(-count // size), dtype=jnp.int32) * size)
    return jnp.moveaxis(found, 0, 2).reshape(batch, heads, -1)[..., :count]
