"""RMS norm, alone or as what comes before a product."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Norm(NamedTuple):
    """RMS norm (Zhang and Sennrich 2019).

    Attributes:
        gain: factor on each channel, [D].
        eps: added to the mean square.
    """

    gain: Float[Array, " D"]
    eps: float

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """x / sqrt(mean(x²) + eps) · gain, in float32 inside."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.broadcast_to(self.gain, x.shape)
