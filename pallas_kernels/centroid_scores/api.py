"""The public function, and the choice of who computes it."""

from jaxtyping import Array, Float

from ..dispatch import Implementation, choose
from ..rotary import Turned, heads_of
from . import reference


def centroid_scores(
    q: Float[Array, "B N H"] | Turned,
    centroids: Float[Array, "B K M H"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K G M"]:
    """Products of queries with centroids, each multiplied and added up in float32, as no matrix unit does (ClusterKV, section IV-C).

    Query head n reads KV head n // (N / K); G = N / K query heads share its centroids.

    Args:
        q: queries, rotated or `Turned`.
        centroids: means of the keys of clusters, in float32.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`. There is no body for TPUs.
        interpret: run a Pallas body in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """

    def gpu() -> str | None:
        from . import gpu

        return gpu.refuses(q, centroids)

    if choose("centroid_scores", implementation, gpu=gpu, interpret=interpret) == "xla":
        return reference.centroid_scores(heads_of(q), centroids)
    from . import gpu as body

    return body.centroid_scores(q, centroids, interpret=interpret)
