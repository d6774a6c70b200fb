"""The public functions, and the choice of who computes them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op
from .lloyd import Distance
from .types import Nearest


def _prefer_xla_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    few = keys.dtype == jnp.float32 and keys.shape[-2] <= 64
    return "few float32 keys are as fast in XLA" if few else None


_KMEANS = Op("kmeans", __name__, gpu=("kmeans_pallas_triton",), tpu=("kmeans_pallas_mosaic_tpu",))
_NEAREST = Op(
    "nearest",
    __name__,
    gpu=(".hopper.nearest", "nearest_pallas_triton"),
    tpu=("nearest_pallas_mosaic_tpu",),
    prefer_xla_reason=_prefer_xla_reason,
)
_NEWEST_DUPLICATE = Op("newest_duplicate", __name__, gpu=("newest_duplicate_pallas_triton",))


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
    return _KMEANS(x, mask, init, clusters, **options, implementation=implementation, interpret=interpret)


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Nearest:
    """For each query the key with the largest inner product plus bias, of equally good ones the first.

    With the bias -|key|²/2 that is the key at the least Euclidean distance. Products are accumulated in float32, and of
    float32 operands exact to it. In XLA, whose sums depend on the size of the batch, scores within rounding are equally good (see
    `ties`); kernels, whose sums do not, compare them as they are.

    Args:
        queries, keys: of one dtype.
        bias: added to every score of a key, in float32. -inf forbids a key, whose contents, NaN included, then do not matter.
        implementation: "auto" takes the device's Pallas kernel where it serves; it keeps no scores in memory.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _NEAREST(queries, keys, bias, implementation=implementation, interpret=interpret)


def newest_duplicate(
    keys: Float[Array, "B K T H"],
    live: Bool[Array, "B K T"],
    threshold: float,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Int[Array, "B K T"]:
    """For each key the place of the last other one whose cosine with it is above a threshold; -1 where there is none, or no key.

    The token that R-KV does not charge for its duplicate (Cai et al. 2025, R-KV, section 3.3). A key of length 0 has a cosine of 0 with all.

    Args:
        keys: 0 where there is none.
        live: where there are keys; others are nobody's duplicate.
        threshold: cosine above which two keys are nearly duplicates.
        implementation: "auto" takes the GPU's Pallas kernel where it serves; it keeps no cosines in memory.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    keys = jax.lax.stop_gradient(keys)  # a place has no gradient
    return _NEWEST_DUPLICATE(keys, live, threshold=threshold, implementation=implementation, interpret=interpret)
