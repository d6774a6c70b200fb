"""Public functions. Each `Op` picks a kernel or XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op
from .types import Always

_TOP_K = Op("top_k", __name__, gpu=("top_k_pallas_triton",), tpu=("top_k_pallas_mosaic_tpu",))
_TOP_K_INDICES = Op("top_k_indices", __name__, gpu=("top_k_pallas_triton",))
_CLUSTER_TOKENS = Op("cluster_tokens", __name__, gpu=("cluster_tokens_pallas_triton",))


def top_k(
    scores: Float[Array, "*B N"],
    count: Int[Array, "*#B"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Bool[Array, "*B N"]:
    """Return a mask of the `count` highest scores of each row. Ties go to the first index.

    Scores are compared in float32. Scores within rounding of the last chosen one count as equal to it (see `ties`).
    -0.0 equals 0.0, -inf can be chosen, and NaN is lower than all other scores. All implementations choose the same.
    `kvjax.cache.compact` converts the mask to ascending indices.

    Args:
        scores: N scores per row.
        count: number to choose in each row; N or more chooses all, 0 or less none.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The mask, in the shape of `scores`.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> kvjax.pallas_kernels.top_k(jnp.asarray([[3.0, 1.0, 3.0, 2.0]]), jnp.asarray([2])).tolist()
        [[True, False, True, False]]
    """
    if scores.size == 0:
        return jnp.zeros(scores.shape, bool)
    rows, counts = _rows(scores, count)
    return _TOP_K(rows, counts, implementation=implementation, interpret=interpret).reshape(scores.shape)


def top_k_indices(
    scores: Float[Array, "*B N"],
    count: Int[Array, "*#B"],
    size: int,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "*B S"], Bool[Array, "*B S"]]:
    """Return the indices of the `count` highest scores of each row. Scores are compared as in `top_k`.

    -inf and NaN are never chosen, so that there can be fewer. All implementations choose the same indices, but in
    different orders.

    Args:
        scores: N scores per row.
        count: number to choose in each row, at most `size`; 0 or less chooses none.
        size: S, at most N.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`. There is no TPU kernel.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        S indices per row, the chosen ones first, and a mask of the chosen ones. The other indices are arbitrary but in
        range.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> index, chosen = kvjax.pallas_kernels.top_k_indices(jnp.asarray([[3.0, 1.0, 2.0]]), jnp.asarray([1]), size=2)
        >>> index[chosen].tolist(), chosen.tolist()
        ([0], [[True, False]])
    """
    rows, counts = _rows(scores, count)
    index, live = _TOP_K_INDICES(rows, counts, size, implementation=implementation, interpret=interpret)
    return tuple(x.reshape(*scores.shape[:-1], size) for x in (index, live))


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    always: Always | None = None,
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
    """Choose tokens of whole clusters, highest score first, until a limit is reached (ClusterKV, section IV-C).

    The last cluster that does not fit completely contributes its first tokens in `order`. Ties go to the first cluster,
    and NaN is lower than all other scores. All implementations choose the same tokens, but in different orders.

    Args:
        scores: score of each cluster, for each of the G queries that share a KV head's clusters.
        sizes: tokens per cluster, 0 for unused clusters.
        starts: index in `order` at which a cluster's tokens begin.
        order: tokens, with those of each cluster adjacent.
        room: maximum number of tokens per sequence, up to `size`.
        size: S, length of the result for tokens of clusters.
        always: tokens that are added to every result, which then has length P instead of S.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`. There is no TPU kernel.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        Tokens, and a mask of the valid ones. In the first S entries, tokens of clusters precede invalid ones. Invalid
        entries are tokens of `order`, or positions below C.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> scores, sizes, starts = jnp.asarray([[[[1.0, 2.0]]]]), jnp.asarray([[[2, 3]]]), jnp.asarray([[[0, 2]]])
        >>> order = jnp.asarray([[[0, 3, 1, 2, 4]]])  # cluster 0 has tokens 0 and 3, cluster 1 the others
        >>> room = jnp.asarray([4])
        >>> tokens, valid = kvjax.pallas_kernels.cluster_tokens(scores, sizes, starts, order, room, size=4)
        >>> tokens[valid].tolist()
        [1, 2, 4, 0]
    """
    given = scores, sizes, starts, order, room, size, always
    return _CLUSTER_TOKENS(*given, implementation=implementation, interpret=interpret)


def _rows(scores: Array, count: Array) -> tuple[Float[Array, "R N"], Int[Array, " R"]]:
    """Return all rows as one axis, and the number of scores to choose in each, clipped to [0, N]."""
    scores, size = jax.lax.stop_gradient(scores), scores.shape[-1]
    return scores.reshape(-1, size), jnp.clip(jnp.broadcast_to(count, scores.shape[:-1]), 0, size).reshape(-1)
