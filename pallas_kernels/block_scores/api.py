"""The public functions, and the choice of who computes them."""

from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from ..rotary import DeferredRope

_PAGES = Op("page_scores", __name__, gpu=("pallas_triton",))
_WIDEN = Op("widen_bounds", __name__, gpu=("pallas_triton",))
_CENTROIDS = Op("centroid_scores", __name__, gpu=("pallas_triton",))


def page_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    bounds: Float[Array, "B K P W"],
    tokens: Int[Array, " B"],
    *,
    page: int,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B N P"]:
    """Σ_d max(q_d · low_d, q_d · high_d): no key between the bounds has a larger product with the query (Quest, section 3.3).

    Query head n reads KV head n // (N / K).

    Args:
        q: queries, rotated or `DeferredRope`.
        bounds: of each page the least value of every key channel, and then the greatest: W = 2 H.
        tokens: of a row; pages of later ones score -inf, whatever their bounds hold.
        page: tokens to a page.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        Bounds of products, in float32.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    return _PAGES(q, bounds, tokens, page=page, implementation=implementation, interpret=interpret)


def widen_bounds(
    bounds: Float[Array, "B K P W"],
    key: Float[Array, "B K H"] | DeferredRope,
    pos: Int[Array, " B"],
    *,
    page: int,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K P W"]:
    """The bounds of pages (Quest, section 3.3) with a new token per row, in place where `bounds` are not used again.

    Args:
        bounds: of each page the least value of every key channel, and then the greatest: W = 2 H.
        key: the new token's, rotated or `DeferredRope`.
        pos: its position; the first token of a page finds nothing there, and one beyond the last page changes nothing.
        page: tokens to a page.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    return _WIDEN(bounds, key, pos, page=page, implementation=implementation, interpret=interpret)


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
    return _CENTROIDS(q, centroids, implementation=implementation, interpret=interpret)
