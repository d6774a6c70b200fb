"""Rotary position embedding (Su et al. 2021) from given cosines and sines."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate_halves(
    x: Float[Array, "*B H"], cos: Float[Array, "*#B R"], sin: Float[Array, "*#B R"]
) -> Float[Array, "*B H"]:
    """Rotate `x` in float32. Channel i of the first half of a head pairs with channel i of the second half, as in
    Llama.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class DeferredRope(NamedTuple):
    """Heads whose rotary embedding a kernel applies while it reads them. Channels pair as in `rotate_halves`.

    Attributes:
        x: unrotated heads.
        cos, sin: cosine and sine of the angle of each channel pair, per sequence, in float32.

    Example:
        >>> angle = jnp.asarray([[jnp.pi / 2]])
        >>> q = kvjax.pallas_kernels.DeferredRope(jnp.asarray([[[1.0, 0.0]]]), jnp.cos(angle), jnp.sin(angle))
        >>> bool(jnp.allclose(kvjax.pallas_kernels.heads_of(q), jnp.asarray([0.0, 1.0]), atol=1e-6))
        True
    """

    x: Float[Array, "B N H"]
    cos: Float[Array, "B R"]
    sin: Float[Array, "B R"]

    def __call__(self) -> Float[Array, "B N H"]:
        """Return the heads, rotated in float32."""
        return rotate_halves(self.x, self.cos[:, None], self.sin[:, None])


def parts_of(q: Array | DeferredRope) -> tuple[Array, ...]:
    """Return the arrays that a kernel reads: the heads, and the cosines and sines if the rotation is deferred."""
    return tuple(q) if isinstance(q, DeferredRope) else (q,)


def heads_of(q: Array | DeferredRope) -> Array:
    """Return the rotated heads. A deferred rotation is applied here.

    Example:
        >>> q = jnp.ones((1, 2, 4))
        >>> kvjax.pallas_kernels.heads_of(q) is q  # nothing is deferred
        True
    """
    return q() if isinstance(q, DeferredRope) else q
