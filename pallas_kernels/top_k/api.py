"""The public function, and the choice of who computes it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import Implementation, choose
from . import reference


def top_k(
    scores: Float[Array, "*B N"],
    count: Int[Array, "*#B"],
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Bool[Array, "*B N"]:
    """Which are the `count` highest scores of each row; of equal ones the first.

    Scores are compared in float32: -0.0 equals 0.0, -inf may be chosen, and NaN is lower than all. Every implementation
    chooses the same. `kvjax.cache.compact` makes ascending indices of the mask.

    Args:
        scores: N for each row.
        count: how many of a row; all where N or more, none where 0 or less.
        implementation: who computes it, see `kvjax.pallas_kernels.dispatch`.
        interpret: interpret the Pallas body that was named, on any device.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    size = scores.shape[-1]
    count = jnp.broadcast_to(count, scores.shape[:-1])
    if scores.size == 0:
        return jnp.zeros(scores.shape, bool)
    body = choose("top_k", implementation, gpu=lambda: _gpu().refuses(size), interpret=interpret)
    if body == "xla":
        return reference.top_k(scores, count)
    keep = _gpu().top_k(scores.reshape(-1, size), jnp.clip(count, 0, size).reshape(-1), interpret=interpret)
    return keep.reshape(scores.shape)


def _gpu() -> Any:
    from . import gpu

    return gpu
