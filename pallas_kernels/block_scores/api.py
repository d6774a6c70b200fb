"""Public functions. Each `Op` picks a Triton kernel or XLA."""

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
    """Upper bound of q · k over the keys k of each page: Σ_d max(q_d · low_d, q_d · high_d) (Quest, section 3.3).

    Query head n reads KV head n // (N / K).

    Args:
        q: queries, rotated or `DeferredRope`.
        bounds: minimum and then maximum of every key channel per page; W = 2 H.
        tokens: number of tokens per sequence. Pages after them score -inf, whatever their bounds contain.
        page: tokens per page.
        implementation: "auto" picks the Triton kernel if it supports the case, else XLA; see `kvjax.pallas_kernels.op`.
            There is no TPU kernel.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One score per query head and page, in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> low, high = [-1.0, -2.0], [1.0, 0.0]
        >>> bounds, q = jnp.asarray([[[low + high]]]), jnp.asarray([[[1.0, -1.0]]])
        >>> kvjax.pallas_kernels.page_scores(q, bounds, jnp.asarray([4]), page=4).item()  # 1 · 1 + -1 · -2
        3.0
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
    """Extend the bounds of each sequence's newest page (Quest, section 3.3) by one token.

    The update is in place if `bounds` is not used again.

    Args:
        bounds: minimum and then maximum of every key channel per page; W = 2 H.
        key: keys of the new token, rotated or `DeferredRope`.
        pos: position of the new token. The first token of a page overwrites that page's bounds. A position after the
            last page changes nothing.
        page: tokens per page.
        implementation: "auto" picks the Triton kernel if it supports the case, else XLA; see `kvjax.pallas_kernels.op`.
            There is no TPU kernel.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The new bounds.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> bounds, key = jnp.asarray([[[[-1.0, -2.0, 1.0, 0.0]]]]), jnp.asarray([[[3.0, -1.0]]])
        >>> kvjax.pallas_kernels.widen_bounds(bounds, key, jnp.asarray([1]), page=4).ravel().tolist()
        [-1.0, -2.0, 3.0, 0.0]
    """
    return _WIDEN(bounds, key, pos, page=page, implementation=implementation, interpret=interpret)


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    centroids: Float[Array, "B K M H"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K G M"]:
    """Inner products of queries and centroids (ClusterKV, section IV-C).

    They are multiplied and added in float32, without matrix units. Query head n reads KV head n // (N / K); G = N / K
    query heads share its centroids.

    Args:
        q: queries, rotated or `DeferredRope`.
        centroids: mean key of each cluster, in float32.
        implementation: "auto" picks the Triton kernel if it supports the case, else XLA; see `kvjax.pallas_kernels.op`.
            There is no TPU kernel.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One score per query head and cluster, in float32.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> q, centroids = jnp.asarray([[[1.0, 2.0]]]), jnp.asarray([[[[1.0, 0.0], [0.0, 1.0]]]])
        >>> kvjax.pallas_kernels.centroid_scores(q, centroids).ravel().tolist()
        [1.0, 2.0]
    """
    return _CENTROIDS(q, centroids, implementation=implementation, interpret=interpret)
