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
        gain: factor of each channel, [D], less the offset.
        eps: added to the mean square.
        offset: added to the gain, if not None. The product with the gain is then rounded once, and not before it, too.

    Example:
        >>> x, weight = jnp.asarray([[3.0, 4.0]]), jnp.eye(2)
        >>> norm = kvjax.pallas_kernels.Norm(gain=jnp.ones(2), eps=0.0)
        >>> (out,) = kvjax.pallas_kernels.projection(x, weight, norm=norm)
        >>> bool(jnp.allclose(out, x / np.sqrt((9 + 16) / 2)))
        True
    """

    gain: Float[Array, " D"]
    eps: float
    offset: float | None = None

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return x / sqrt(mean(x²) + eps) · (gain + offset), computed in float32."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.offset is None:
            return wide.astype(x.dtype) * jnp.broadcast_to(self.gain, x.shape)
        gain = self.gain.astype(jnp.float32) + self.offset
        return (wide * jnp.broadcast_to(gain, wide.shape)).astype(x.dtype)
