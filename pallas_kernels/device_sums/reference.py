"""XLA's own collectives."""

from typing import Any

import jax
from jaxtyping import Array, Shaped


def device_gather(x: Shaped[Array, "*S"], axes: tuple[str, ...], mesh: Any) -> Shaped[Array, "N *S"]:
    """See the public function."""
    return jax.lax.all_gather(x, axes)


def device_sum(
    x: Shaped[Array, "*S"], axes: tuple[str, ...], mesh: Any, *, residual: Array | None
) -> Shaped[Array, "*S"]:
    """See the public function."""
    total = jax.lax.psum(x, axes)
    return total if residual is None else residual + total.astype(residual.dtype)
