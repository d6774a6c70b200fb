"""The public function, and the choice of who computes it."""

import jax
from jaxtyping import Array, Float, Int

from ..nearest import Nearest
from ..op import Implementation, Op

_OP = Op("chunk_similarity", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",))


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
    return _OP(keys, first, count, chunk, implementation=implementation, interpret=interpret)
