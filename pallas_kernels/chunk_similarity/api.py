"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Bool, Float

from ..dispatch import Implementation, choose
from ..nearest import Nearest
from . import reference


def chunk_similarity(
    keys: Float[Array, "*B C W"],
    live: Bool[Array, "*B C"],
    *,
    head_dim: int | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Nearest:
    """From each even place of a chunk of C >= 2 places, the edge to the odd place with the most similar key.

    Edges of Chunked Soft Matching (Hu et al. 2025, section 5.2). Similarity is the cosine, in whole multiples of `RESOLUTION`.

    Args:
        keys: chunks of keys; what is not live may hold anything.
        live: which places hold something.
        head_dim: if given, keys are the first so many of the W channels: those that stand beside their values need no copy.
        implementation: "auto" takes the device's Pallas body where it serves; it keeps no similarities in memory.
        interpret: run a Pallas body in its interpreter, on any device.

    Returns:
        Similarity of each edge, -inf where there is none, and where it leads: 0 for place 1, 1 for place 3, and so on; of
        equally similar keys, to the first.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    dim = keys.shape[-1] if head_dim is None else head_dim

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(keys, dim)

    def tpu() -> str | None:
        from . import tpu

        return tpu.refuses(keys, dim)

    chosen = choose("chunk_similarity", implementation, tpu=tpu, gpu=gpu, interpret=interpret)
    if chosen == "xla":
        return reference.chunk_similarity(keys[..., :dim], live)
    if chosen == "gpu":
        from .gpu import chunk_similarity as body
    else:
        from .tpu import chunk_similarity as body
    return body(keys, live, dim, interpret=interpret)
