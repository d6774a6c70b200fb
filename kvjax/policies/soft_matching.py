"""Chunked Soft Matching: merge the most similar keys of each chunk, all chunks of a head competing (Hu et al. 2025, section 5.2).

Tokens are divided into chunks of c. Inside a chunk those at even places are the set A, those at odd places the set B; an edge
leads from each token of A to the token of B whose key is most similar. The strongest edges over all chunks of a head merge
their ends: every token of B becomes the mean of itself and of the tokens of A that it is joined to, each counted as often as
the tokens it stands for. All edges lead from A to B, so clusters are stars, and merging them needs no search.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import compact
from kvjax.pallas_kernels import chunk_similarity, top_k


@flax.struct.dataclass
class Clusters:
    """Tokens and clusters of tokens, in order, the first ones live. B rows, K KV heads, S places, H head dim; float32.

    Attributes:
        kv: keys, and then values, side by side so that both move at once; of a cluster, the means over its tokens.
        pos: original position, of a cluster that of its newest token; -1 where there is nothing.
        weight: how many tokens each stands for, 0 where there is nothing.
    """

    kv: Float[Array, "B K S 2*H"]
    pos: Int[Array, "B K S"]
    weight: Float[Array, "B K S"]

    @property
    def k(self) -> Float[Array, "B K S H"]:
        """Keys."""
        return self.kv[..., : self.kv.shape[-1] // 2]

    @property
    def v(self) -> Float[Array, "B K S H"]:
        """Values."""
        return self.kv[..., self.kv.shape[-1] // 2 :]


def edges(size: Int[Array, " B"], chunk: int) -> Int[Array, " B"]:
    """How many edges `size` tokens have: one for each token of A, unless it is alone in the last chunk."""
    half = -(-chunk // 2)
    rest = size % chunk
    return size // chunk * half + jnp.where(rest == 1, 0, (rest + 1) // 2)


def merge(tokens: Clusters, size: Int[Array, " B"], count: Int[Array, " B"], chunk: int) -> Clusters:
    """Merge along the `count` strongest edges among the first `size` tokens of each row; the others stay as they are.

    A cluster stands where its token of B stood, and gaps are closed, so order is kept and neighbours stay near.

    Args:
        count: at most `edges(size, chunk)`.
        chunk: c, a divisor of the number of places.
    """
    batch, heads, places, width = tokens.kv.shape
    shape = (batch, heads, places // chunk, chunk)
    kv, pos, weight = tokens.kv.reshape(*shape, width), tokens.pos.reshape(shape), tokens.weight.reshape(shape)
    live = (jnp.arange(places, dtype=jnp.int32) < size[:, None, None]).reshape(batch, 1, *shape[2:])

    similarity, target = chunk_similarity(kv, jnp.broadcast_to(live, shape), head_dim=width // 2)
    kept = top_k(similarity.reshape(batch, heads, -1), count[:, None]).reshape(similarity.shape)
    joined = kept[..., None] & (target[..., None] == jnp.arange(chunk // 2, dtype=jnp.int32))  # [B, K, chunk, A, B]

    share = jnp.where(joined, weight[..., 0::2, None], 0.0)
    odd, odd_kv = weight[..., 1::2], kv[..., 1::2, :]
    degree = odd + jnp.sum(share, axis=-2)
    total = odd[..., None] * odd_kv + jnp.einsum("...ab,...ah->...bh", share, kv[..., 0::2, :], precision="highest")
    grown = degree > odd
    centroid = jnp.where(grown[..., None], total / jnp.maximum(degree, 1.0)[..., None], odd_kv)
    newest = jnp.maximum(pos[..., 1::2], jnp.max(jnp.where(joined, pos[..., 0::2, None], -1), axis=-2))

    stays = jnp.stack([~kept, jnp.ones_like(kept)], axis=-1).reshape(*kept.shape[:-1], -1)[..., :chunk]
    index, filled = compact(stays.reshape(batch, heads, places) & (tokens.weight > 0), places)
    source = jnp.asarray(_halves(places, chunk))[index]

    def gather(even: Array, odd: Array, free: int) -> Array:
        """What stays, in order, from the even places of all chunks and the odd ones."""
        halves = jnp.concatenate([x.reshape(batch, heads, -1, *x.shape[4:]) for x in (even, odd)], axis=2)
        wide = (...,) + (None,) * (halves.ndim - 3)
        return jnp.where(
            filled[wide], jnp.take_along_axis(halves, source[wide], axis=2), jnp.asarray(free, halves.dtype)
        )

    return Clusters(
        kv=gather(kv[..., 0::2, :], centroid, 0),
        pos=gather(pos[..., 0::2], newest, -1),
        weight=gather(weight[..., 0::2], degree, 0),
    )


def _halves(places: int, chunk: int) -> Int[np.ndarray, " S"]:
    """Where each place is when the even places of all chunks are written first, and then the odd ones."""
    place = np.arange(places, dtype=np.int32)
    at, half = place % chunk, -(-chunk // 2)
    even = place // chunk * half + at // 2
    odd = places // chunk * half + place // chunk * (chunk // 2) + at // 2
    return np.where(at % 2 == 0, even, odd)


def pad(tokens: Clusters, places: int) -> Clusters:
    """The same with room for `places`, which are at least as many as there are."""

    def widen(x: Array, fill: int) -> Array:
        width = [(0, 0), (0, 0), (0, places - x.shape[2])] + [(0, 0)] * (x.ndim - 3)
        return jnp.pad(x, width, constant_values=fill)

    return Clusters(widen(tokens.kv, 0), widen(tokens.pos, -1), widen(tokens.weight, 0))


def shift(tokens: Clusters, by: Int[Array, " B"]) -> Clusters:
    """The same without each row's first `by` places (or, where negative, with that many empty ones in front)."""
    places = tokens.pos.shape[2]
    index = jnp.arange(places, dtype=jnp.int32) + by[:, None]
    inside = ((index >= 0) & (index < places))[:, None]
    index = jnp.clip(index, 0, places - 1)[:, None]

    def take(x: Array, fill: int) -> Array:
        wide = (slice(None),) * 3 + (None,) * (x.ndim - 3)
        return jnp.where(inside[wide], jnp.take_along_axis(x, index[wide], axis=2), jnp.asarray(fill, x.dtype))

    return Clusters(take(tokens.kv, 0), take(tokens.pos, -1), take(tokens.weight, 0))
