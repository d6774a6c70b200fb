"""The public functions, and the choice of who computes them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..op import Implementation, Op

_TOP_K = Op("top_k", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",))
_TOP_K_INDICES = Op("top_k_indices", __name__, gpu=("pallas_triton",))


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


def _rows(scores: Array, count: Array) -> tuple[Float[Array, "R N"], Int[Array, " R"]]:
    """All rows one after the other, and how many scores to choose in each, which there are."""
    scores, size = jax.lax.stop_gradient(scores), scores.shape[-1]
    return scores.reshape(-1, size), jnp.clip(jnp.broadcast_to(count, scores.shape[:-1]), 0, size).reshape(-1)
