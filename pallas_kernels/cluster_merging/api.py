"""The public functions, and the choice of who computes them."""

import jax
from jaxtyping import Array, Float, Int

from ..kmeans import Nearest
from ..op import Implementation, Op
from .types import Clusters

_SIMILARITY = Op(
    "chunk_similarity",
    __name__,
    gpu=("chunk_similarity_pallas_triton",),
    tpu=("chunk_similarity_pallas_mosaic_tpu",),
)
_MERGE = Op("merge_clusters", __name__, gpu=("merge_clusters_pallas_triton",))
_COPY = Op("copy_clusters", __name__, gpu=("merge_clusters_pallas_triton",))


def chunk_similarity(
    keys: Float[Array, "B K S H"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Nearest:
    """From each even place of a chunk, the edge to the odd place with the most similar key.

    Edges of Chunked Soft Matching (Hu et al. 2025, section 5.2). Similarity is the cosine, in whole multiples of `RESOLUTION`.

    Args:
        keys: by place; what is not among those that are compared may hold anything.
        first: where each row's first chunk begins.
        count: how many places from there on hold a key.
        chunk: C >= 2 places of a chunk.
        implementation: "auto" takes the device's Pallas kernel where it serves; it keeps no similarities in memory.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        Of each edge [B, K, N, A], for N = ⌈S / C⌉ chunks and the A = ⌈C / 2⌉ even places of each: its similarity, -inf where there is
        none, and where it leads: 0 for place 1 of the chunk, 1 for place 3, and so on; of equally similar keys, to the first.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    keys = jax.lax.stop_gradient(keys)  # which edge is best has no gradient
    return _SIMILARITY(keys, first, count, chunk, implementation=implementation, interpret=interpret)


def merge_clusters(
    tokens: Clusters,
    target: Int[Array, "B K N A"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    chunk: int,
    *,
    into: Clusters | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Clusters:
    """Tokens at even places of a chunk become part of tokens at odd places; what is left moves up, in order.

    A step of Chunked Soft Matching (Hu et al. 2025, section 5.2) once its edges are chosen. A token that others are merged into
    becomes the mean of all, each counted by its weight, in float32 until it is written; its weight is then the sum of theirs, and its
    position that of the newest.

    Args:
        target: for each of the A = ⌈C / 2⌉ even places of the N = ⌈S / C⌉ chunks, what its token is merged into: 0 for place 1 of
            the chunk, 1 for place 3, and so on; -1 where it stays, or where there is none.
        first: where each row's first chunk begins; what is before stays as it is.
        count: tokens of each row from there on. Places after them may hold anything.
        chunk: C places of a chunk.
        into: arrays to be written to in place, where they are not used again; what they hold is not read.
        implementation: "auto" takes the device's Pallas kernel where it serves; its work follows `count`, not S.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        What is before the chunks, and what is left of them. Places after that may hold anything.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"chunk": chunk, "into": into}
    return Clusters(
        *_MERGE(tokens, target, first, count, **options, implementation=implementation, interpret=interpret)
    )


def copy_clusters(
    tokens: Clusters,
    size: Int[Array, " B"],
    into: Clusters,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Clusters:
    """Tokens as they are, elsewhere: back in a cache that merging has left.

    Args:
        size: tokens of each row, in its first places.
        into: arrays to be written to in place, where they are not used again; beyond a row's tokens they are as before, or may hold anything.
        implementation: "auto" takes the device's Pallas kernel where it serves; without one XLA copies what it has to.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return Clusters(*_COPY(tokens, size, into, implementation=implementation, interpret=interpret))
