"""Chunked Soft Matching: merge the most similar keys of each chunk, all chunks of a head competing (Hu et al. 2025, section 5.2).

Tokens are divided into chunks of c. Inside a chunk those at even places are the set A, those at odd places the set B; an edge
leads from each token of A to the token of B whose key is most similar. The strongest edges over all chunks of a head merge
their ends: every token of B becomes the mean of itself and of the tokens of A that it is joined to, each counted as often as
the tokens it stands for. All edges lead from A to B, so clusters are stars, and merging them needs no search.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import chunk_similarity, merge_clusters, top_k


@flax.struct.dataclass
class Clusters:
    """Tokens and clusters of tokens, in order. B rows, K KV heads, S places, H head dim; float32.

    How many there are is known elsewhere; they stand in the first places, and the other places may hold anything.

    Attributes:
        kv: keys, and then values, side by side so that both move at once; of a cluster, the means over its tokens.
        pos: original position, of a cluster that of its newest token.
        weight: how many tokens each stands for.
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


def merge(
    tokens: Clusters,
    held: Int[Array, " B"],
    size: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    into: Clusters | None = None,
) -> Clusters:
    """Merge along the `count` strongest edges among the first `size` tokens of each row; the others stay as they are.

    A cluster stands where its token of B stood, and gaps are closed, so order is kept and neighbours stay near.

    Args:
        held: tokens of each row in all.
        size: at most `held`.
        count: at most `edges(size, chunk)`.
        chunk: c, a divisor of the number of places.
        into: room for the result that is not used otherwise.
    """
    batch, heads, places, width = tokens.kv.shape
    shape = (batch, heads, places // chunk, chunk)
    live = (jnp.arange(places, dtype=jnp.int32) < size[:, None, None]).reshape(batch, 1, *shape[2:])
    kv = tokens.kv.reshape(*shape, width)
    similarity, target = chunk_similarity(kv, jnp.broadcast_to(live, shape), head_dim=width // 2)
    kept = top_k(similarity.reshape(batch, heads, -1), count[:, None]).reshape(similarity.shape)
    room = None if into is None else (into.kv, into.pos, into.weight)
    return Clusters(*merge_clusters(tokens.kv, tokens.pos, tokens.weight, jnp.where(kept, target, -1), held, into=room))


def between(
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    pos: Int[Array, "B K C"],
    weight: Float[Array, "B K C"],
    first: Int[Array, " B"],
    places: int,
) -> Clusters:
    """The tokens from each row's place `first` on, in `places` places."""
    index = jnp.arange(places, dtype=jnp.int32) + first[:, None]
    kv = jnp.concatenate([taken(k, index), taken(v, index)], axis=-1).astype(jnp.float32)
    return Clusters(kv, taken(pos, index), taken(weight, index))


def taken(x: Array, index: Int[Array, "B S"]) -> Array:
    """Entries [B, K, S, ...] of `x` [B, K, C, ...] at each row's places; beyond its ends, the nearest."""
    wide = (slice(None), None, slice(None)) + (None,) * (x.ndim - 3)
    return jnp.take_along_axis(x, index[wide], axis=2, mode="clip")
