"""XLA reference of `chunk_similarity`, `merge_clusters` and `copy_clusters`.

The `Op`s in `api.py` call it if no kernel supports the case. Similarities are one matmul per chunk. Merging is another
matmul per chunk, then a gather of the remaining tokens.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..kmeans import Nearest
from .chunks import chunked, from_slot
from .types import Clusters

RESOLUTION = 2.0**-14
"""Resolution of the cosines. They are rounded to a multiple of it before they are compared.

In repeated text, keys of the same two tokens at the same distance are equally similar. Without rounding, the choice
among such edges would depend on rounding errors, which vary with the batch size.
"""


def chunk_similarity(
    keys: Float[Array, "B K S H"], first: Int[Array, " B"], count: Int[Array, " B"], chunk: int
) -> Nearest:
    """Find the most similar odd slot for each even slot of a chunk; see the public function."""
    keys, live = chunked(keys, first, count, chunk)
    keys = keys.astype(jnp.float32)
    length = jnp.linalg.norm(keys, axis=-1, keepdims=True)
    unit = keys / jnp.maximum(length, jnp.finfo(keys.dtype).tiny)
    cosine = jnp.einsum("...ah,...bh->...ab", unit[..., 0::2, :], unit[..., 1::2, :], precision="highest")
    cosine = jnp.round(cosine / RESOLUTION) * RESOLUTION
    cosine = jnp.where(live[..., 0::2, None] & live[..., None, 1::2], cosine, -jnp.inf)
    return Nearest(jnp.max(cosine, axis=-1), jnp.argmax(cosine, axis=-1).astype(jnp.int32))


def merge_clusters(
    tokens: Clusters,
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    into: Clusters | None = None,
) -> list[Array]:
    """Merge tokens and close gaps; see the public function.

    In slots without a token, keys, values and weights are 0 and positions are -1.
    """
    (k, live), (v, _), (pos, _), (weight, _) = (chunked(x, first, count, chunk) for x in tokens)
    weight = jnp.where(live, weight, 0.0)
    pos = jnp.where(live, pos, -1)
    joined = target[..., None] == jnp.arange(chunk // 2, dtype=jnp.int32)  # [B, K, N, A, odd slots]

    share = jnp.where(joined, weight[..., 0::2, None], 0.0)
    odd = weight[..., 1::2]
    degree = odd + jnp.sum(share, axis=-2)
    newest = jnp.maximum(pos[..., 1::2], jnp.max(jnp.where(joined, pos[..., 0::2, None], -1), axis=-2))

    def mean(rows: Array) -> tuple[Array, Array]:
        """Return the rows at even slots, and those at odd slots with the tokens merged into them."""
        rows = jnp.where(live[..., None], rows, jnp.zeros((), rows.dtype))
        even, centroid = (rows[..., i::2, :].astype(jnp.float32) for i in range(2))
        total = odd[..., None] * centroid + jnp.einsum("...ab,...ah->...bh", share, even, precision="highest")
        centroid = jnp.where((degree > odd)[..., None], total / jnp.maximum(degree, 1.0)[..., None], centroid)
        return rows[..., 0::2, :], centroid.astype(rows.dtype)

    batch, heads, slots = tokens[2].shape
    size = live.shape[2] * chunk
    stays = jnp.stack([target < 0, jnp.ones_like(target, bool)], axis=-1).reshape(*live.shape[:3], -1)[..., :chunk]
    index, filled = _first(stays.reshape(batch, heads, size) & live.reshape(batch, heads, size))
    source = jnp.asarray(_halves(size, chunk))[index]
    back = jnp.arange(slots, dtype=jnp.int32) - first[:, None]

    def gather(before: Array, even: Array, odd: Array, free: int) -> Array:
        """Return the slots before the chunks, then the remaining tokens in order, from the even and odd slots of all
        chunks.
        """
        halves = jnp.concatenate([x.reshape(batch, heads, -1, *x.shape[4:]) for x in (even, odd)], axis=2)
        wide = (...,) + (None,) * (halves.ndim - 3)
        left = jnp.where(
            filled[wide], jnp.take_along_axis(halves, source[wide], axis=2), jnp.asarray(free, halves.dtype)
        )
        left = from_slot(left, -first, slots)
        return jnp.where((back < 0)[:, None][wide], before, left)

    return [
        gather(tokens[0], *mean(k), 0),
        gather(tokens[1], *mean(v), 0),
        gather(tokens[2], pos[..., 0::2], newest, -1),
        gather(tokens[3], weight[..., 0::2], degree, 0),
    ]


def copy_clusters(tokens: Clusters, size: Int[Array, " B"], into: Clusters) -> Clusters:
    """Return the tokens. XLA makes the necessary copies."""
    return tokens


def _first(stays: Bool[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Bool[Array, "B K S"]]:
    """Return the slots where `stays` is True, ascending and padded with 0, and which of them are not padding."""
    batch, heads, slots = stays.shape
    rank = jnp.where(stays, jnp.cumsum(stays, axis=-1, dtype=jnp.int32) - 1, slots)  # out of bounds: dropped
    rows, columns = np.ogrid[:batch, :heads]
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), stays.shape)
    index = jnp.zeros_like(slot).at[rows[..., None], columns[..., None], rank].set(slot, mode="drop")
    return index, jnp.arange(slots, dtype=jnp.int32) < jnp.sum(stays, axis=-1, dtype=jnp.int32)[..., None]


def _halves(slots: int, chunk: int) -> Int[np.ndarray, " S"]:
    """Return each slot's index in an order that has the even slots of all chunks before the odd ones."""
    slot = np.arange(slots, dtype=np.int32)
    at, half = slot % chunk, -(-chunk // 2)
    even = slot // chunk * half + at // 2
    odd = slots // chunk * half + slot // chunk * (chunk // 2) + at // 2
    return np.where(at % 2 == 0, even, odd)
