"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

from ..op import Implementation, Op
from ..rotary import DeferredRope

_OP = Op("centroid_scores", __name__, gpu=("pallas_triton",))


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    centroids: Float[Array, "B K M H"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K G M"]:
    """Products of queries with centroids, each multiplied and added up in float32, as no matrix unit does (ClusterKV, section IV-C).

    Query head n reads KV head n // (N / K); G = N / K query heads share its centroids.

    Args:
        q: queries, rotated or `DeferredRope`.
        centroids: means of the keys of clusters, in float32.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    return _OP(q, centroids, implementation=implementation, interpret=interpret)
