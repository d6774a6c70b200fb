"""RMS norm, standalone or as an argument of the projections."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_ROWS = 16
"""Maximum number of rows that the Triton kernels of the projections multiply."""


class Norm(NamedTuple):
    """RMS norm (Zhang and Sennrich 2019).

    Attributes:
        gain: factor of each channel, [D].
        eps: added to the mean square.
    """

    gain: Float[Array, " D"]
    eps: float

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return x / sqrt(mean(x²) + eps) · gain, computed in float32."""
        return self.unit(x).astype(x.dtype) * jnp.broadcast_to(self.gain, x.shape)

    def unit(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return x / sqrt(mean(x²) + eps) in float32."""
        wide = x.astype(jnp.float32)
        return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
