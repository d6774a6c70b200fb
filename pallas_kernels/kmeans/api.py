"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op
from .lloyd import Distance

_OP = Op("kmeans", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",))


def kmeans(
    x: Float[Array, "B K T H"],
    mask: Bool[Array, "B T"],
    init: Float[Array, "B K M H"],
    clusters: Int[Array, " B"],
    *,
    iterations: int,
    distance: Distance = "cosine",
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "B K M H"], Int[Array, "B K T"]]:
    """Lloyd's algorithm with a fixed number of iterations (ClusterKV, Liu et al. 2024, section III-B).

    An iteration assigns every token to its nearest centroid, of equally near ones the first, and moves each centroid to the
    mean of its tokens as they are, not normalised; a centroid without tokens stays. A last assignment follows. All of it stays
    on the device.

    The order of additions is either fixed (products with one-hot labels) or does not matter (on GPUs, where tokens are rounded so
    that no sum of them is): equal inputs give equal clusters. Tokens of 16 bits are compared with centroids rounded to as many; the centroids themselves
    are kept in float32.

    Args:
        x: what is clustered, for each of B rows and K heads.
        mask: which of the T tokens take part; the others may hold anything.
        init: centroids to start from.
        clusters: how many of the M centroids a row uses; the others stay as they are and get no tokens.
        implementation: "auto" takes the device's Pallas kernels where they serve; they keep no scores in memory.
        interpret: run Pallas kernels in their interpreter, on any device.

    Returns:
        Centroids in float32, and each token's centroid, M for tokens that take no part.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    options = {"iterations": iterations, "distance": distance}
    return _OP(x, mask, init, clusters, **options, implementation=implementation, interpret=interpret)
