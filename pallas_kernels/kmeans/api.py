"""Public functions. Each `Op` picks a kernel or XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op
from .lloyd import Distance
from .types import Nearest


def _prefer_xla_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    few = keys.dtype == jnp.float32 and keys.shape[-2] <= 64
    return "XLA is as fast for few float32 keys" if few else None


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

    An iteration assigns every token to its nearest centroid; ties go to the first. Each centroid then moves to the mean
    of its tokens, which are not normalised. A centroid without tokens stays. A last assignment follows. Everything runs
    on the device.

    Equal inputs give equal clusters. Sums are either in a fixed order (one-hot matmuls), or independent of the order
    (on GPUs, where tokens are rounded so that sums are exact). 16-bit tokens are compared with centroids rounded to the
    same dtype; the centroids themselves are kept in float32.

    Args:
        x: vectors to cluster, separately for each of B sequences and K heads.
        mask: which of the T tokens take part; the others may contain anything.
        init: initial centroids.
        clusters: number of the M centroids that a sequence uses; the others are unchanged and get no tokens.
        iterations: number of iterations.
        distance: measure by which a centroid is nearest; see `Distance`.
        implementation: "auto" picks the device's Pallas kernels if they support the case, else XLA. The kernels keep no
            scores in memory.
        interpret: run the Pallas kernels in interpret mode, on any device.

    Returns:
        Centroids in float32, and the index of each token's centroid, M for tokens that take no part.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> x = jnp.asarray([[[[0.0], [1.0], [10.0], [11.0]]]])
        >>> mask, init, clusters = jnp.ones((1, 4), bool), jnp.asarray([[[[0.0], [5.0]]]]), jnp.asarray([2])
        >>> centroids, label = kvjax.pallas_kernels.kmeans(x, mask, init, clusters, iterations=2, distance="l2")
        >>> centroids.ravel().tolist(), label.ravel().tolist()
        ([0.5, 10.5], [0, 0, 1, 1])
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
    """Find, for each query, the key with the largest inner product plus bias. Ties go to the first key.

    With bias -|key|²/2, this is the key at the smallest Euclidean distance. Products accumulate in float32; float32
    operands are multiplied at full precision.

    In XLA, sums depend on the batch size, so that scores within rounding count as ties; see `ties`. The kernels' sums
    do not, so that they compare scores exactly.

    Args:
        queries, keys: vectors of one dtype.
        bias: added to all scores of a key, in float32. -inf excludes a key, whose contents may then be anything, even
            NaN.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA. The kernels keep no
            scores in memory.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The score and index of each query's key.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> queries, keys = jnp.asarray([[1.0, 0.0], [0.0, 1.0]]), jnp.asarray([[0.0, 2.0], [3.0, 0.0]])
        >>> found = kvjax.pallas_kernels.nearest(queries, keys)
        >>> found.place.tolist(), found.score.tolist()
        ([1, 0], [3.0, 2.0])
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
    """Find, for each key, the last other key whose cosine with it is above a threshold.

    R-KV does not charge this token for its duplicate (Cai et al. 2025, R-KV, section 3.3). A key of length 0 has cosine
    0 with all keys.

    Args:
        keys: the keys, 0 in slots without a key.
        live: which slots contain a key; the others are no duplicates.
        threshold: cosine above which two keys are near duplicates.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA. The kernel keeps no
            cosines in memory.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        Index of the duplicate, -1 if there is none or the slot has no key.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> keys = jnp.asarray([[[[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]]])
        >>> kvjax.pallas_kernels.newest_duplicate(keys, jnp.ones((1, 1, 3), bool), threshold=0.9).ravel().tolist()
        [2, -1, 0]
    """
    keys = jax.lax.stop_gradient(keys)  # an index has no gradient
    return _NEWEST_DUPLICATE(keys, live, threshold=threshold, implementation=implementation, interpret=interpret)
