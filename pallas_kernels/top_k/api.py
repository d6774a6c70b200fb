"""The public functions, and the choice of who computes them."""

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
    """Which are the `count` highest scores of each row; of equal ones the first.

    Scores are compared in float32: what is within rounding of the last that is chosen equals it (see `ties`), -0.0 equals 0.0, -inf
    may be chosen, and NaN is lower than all. Every implementation chooses the same. `kvjax.cache.compact` makes ascending indices of the mask.

    Args:
        scores: N for each row.
        count: how many of a row; all where N or more, none where 0 or less.
        implementation: who computes it, see `kvjax.pallas_kernels.op`.
        interpret: interpret the Pallas kernel that was named, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
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
    """Where the `count` highest scores of each row are, of equal ones the first; they are compared as in `top_k`.

    What is -inf or NaN is never chosen, so there may be fewer. All implementations choose the same, each in an
    order of its own.

    Args:
        scores: N for each row.
        count: how many of a row, at most `size`; none where 0 or less.
        size: S, at most N.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: interpret the Pallas kernel that was named, on any device.

    Returns:
        Places, those that are meant first, and which are meant. All are places in the row.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
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
    """The tokens of whole clusters, the highest score first, until there is room for no more (ClusterKV, section IV-C).

    The cluster for which not all room is left gives its first tokens in `order`. Of equal scores the first cluster comes first; NaN is
    lower than all. All implementations choose the same tokens, each in an order of its own.

    Args:
        scores: of each cluster, for each of the G queries that share a KV head's clusters.
        sizes: tokens of a cluster; 0 where there is no cluster.
        starts: where a cluster's tokens begin in `order`.
        order: tokens, those of one cluster next to each other.
        room: the most tokens to choose in a row of the batch, up to `size`.
        size: S, places for them.
        always: tokens that are taken besides, for which the result has P places instead of S.
        implementation: who computes it, see `kvjax.pallas_kernels.op`. There is no kernel for TPUs.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        Tokens, and which are meant: in the first S places those of clusters before any that are not. All are tokens of `order`, or
        positions below C.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    given = scores, sizes, starts, order, room, size, always
    return _CLUSTER_TOKENS(*given, implementation=implementation, interpret=interpret)


def _rows(scores: Array, count: Array) -> tuple[Float[Array, "R N"], Int[Array, " R"]]:
    """All rows one after the other, and how many scores to choose in each, which there are."""
    scores, size = jax.lax.stop_gradient(scores), scores.shape[-1]
    return scores.reshape(-1, size), jnp.clip(jnp.broadcast_to(count, scores.shape[:-1]), 0, size).reshape(-1)
