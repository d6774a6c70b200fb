"""Public functions. Each `Op` picks a kernel or XLA."""

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
    """Find, for each even slot of a chunk, the odd slot with the most similar key.

    These are the edges of Chunked Soft Matching (Hu et al. 2025, section 5.2). Similarity is the cosine, rounded to a
    multiple of `RESOLUTION`.

    Args:
        keys: keys by slot. Slots outside the chunks may contain anything.
        first: slot at which each sequence's first chunk begins.
        count: number of slots from there on that contain a key.
        chunk: C, slots per chunk, at least 2.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA. The kernels keep no
            similarity matrix in memory.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One edge per even slot, [B, K, N, A], with N = ⌈S / C⌉ chunks and A = ⌈C / 2⌉ even slots per chunk. `score` is
        the similarity, -inf if there is no edge. `place` is the odd slot: 0 for slot 1 of the chunk, 1 for slot 3, and
        so on. Ties go to the first odd slot.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> keys = jnp.asarray([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]]])
        >>> edges = kvjax.pallas_kernels.chunk_similarity(keys, jnp.asarray([0]), jnp.asarray([4]), chunk=4)
        >>> edges.place.ravel().tolist()  # slot 0 is most similar to slot 3; slot 2 is as similar to slot 1 as to 3
        [1, 0]
    """
    keys = jax.lax.stop_gradient(keys)  # the index of the best edge has no gradient
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
    """Merge tokens at even slots of a chunk into tokens at odd slots, and close the gaps, keeping the order.

    This is one step of Chunked Soft Matching (Hu et al. 2025, section 5.2), after its edges are chosen. A token that
    others are merged into becomes the weighted mean of them all, accumulated in float32. Its weight becomes the sum of
    their weights, and its position that of the newest token.

    Args:
        tokens: tokens and clusters of every sequence and KV head.
        target: where each even slot's token is merged to, for the N = ⌈S / C⌉ chunks and their A = ⌈C / 2⌉ even slots.
            0 is slot 1 of the chunk, 1 is slot 3, and so on. -1 means that the token stays, or that there is none.
        first: slot at which each sequence's first chunk begins. Slots before it are unchanged.
        count: number of tokens of each sequence from there on. Slots after them may contain anything.
        chunk: C, slots per chunk.
        into: arrays to write the result to. They are overwritten in place if they are not used again, and their
            contents are not read.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA. The kernel's work is
            proportional to `count`, not to S.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The slots before the chunks, followed by the remaining tokens. Slots after these may contain anything.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x = jnp.asarray([[[[1.0], [3.0], [8.0], [9.0]]]])
        >>> tokens = kvjax.pallas_kernels.Clusters(k=x, v=x, pos=jnp.arange(4)[None, None], weight=jnp.ones((1, 1, 4)))
        >>> target = jnp.asarray([[[[0, -1]]]])  # slot 0 goes into slot 1, slot 2 stays
        >>> merged = kvjax.pallas_kernels.merge_clusters(tokens, target, jnp.asarray([0]), jnp.asarray([4]), chunk=4)
        >>> merged.k.ravel()[:3].tolist(), merged.pos.ravel()[:3].tolist(), merged.weight.ravel()[:3].tolist()
        ([2.0, 8.0, 9.0], [1, 2, 3], [2.0, 1.0, 1.0])
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
    """Copy tokens unchanged into other arrays, for example from the result of a merge back into the cache.

    Args:
        tokens: tokens and clusters of every sequence and KV head.
        size: number of tokens per sequence. They are in its first slots.
        into: arrays to write to, in place if they are not used again. Slots after a sequence's tokens keep their
            contents or may contain anything.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case. Otherwise XLA makes the necessary
            copies.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The copied tokens.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x, Clusters = jnp.asarray([[[[1.0], [2.0], [3.0]]]]), kvjax.pallas_kernels.Clusters
        >>> tokens = Clusters(k=x, v=x, pos=jnp.arange(3)[None, None], weight=jnp.ones((1, 1, 3)))
        >>> into = jax.tree.map(jnp.zeros_like, tokens)
        >>> kvjax.pallas_kernels.copy_clusters(tokens, jnp.asarray([3]), into).k.ravel().tolist()
        [1.0, 2.0, 3.0]
    """
    return Clusters(*_COPY(tokens, size, into, implementation=implementation, interpret=interpret))
