"""8-bit floats (e4m3: 4 bits of exponent, 3 of fraction) with one factor per vector.

A vector x is stored as x / factor with factor = max |x| / 448, so that its largest number is the largest of the format.
Relative errors are at most 1/16, and for numbers below 1/28672 of the largest, absolute errors are at most 1/458752 of the
largest. NaN and infinities are not supported.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .rotary import DeferredRope

FLOAT8 = jnp.float8_e4m3fn

LARGEST = float(jnp.finfo(FLOAT8).max)
"""448, the largest number of the format."""


class Float8Codes(NamedTuple):
    """Vectors that are written as 8-bit floats, divided by their factors.

    Attributes:
        x: the vectors, possibly with a deferred rotation.

    Example:
        >>> x, slot = jnp.asarray([[[1.0, -0.5]]]), jnp.asarray([[1]])
        >>> kernels, codes = kvjax.pallas_kernels, jnp.zeros((1, 1, 2, 2), jnp.float8_e4m3fn)
        >>> (codes,) = kernels.write_slots([codes], slot, [kernels.Float8Codes(x)])
        >>> codes[0, 0].tolist()
        [[0.0, 0.0], [448.0, -224.0]]
    """

    x: Array | DeferredRope


class Float8Factor(NamedTuple):
    """The factors of vectors in 8-bit floats. One factor is written per vector.

    Attributes:
        x: the vectors, as of `Float8Codes`.

    Example:
        >>> x, slot = jnp.asarray([[[1.0, -0.5]]]), jnp.asarray([[1]])
        >>> (factors,) = kvjax.pallas_kernels.write_slots(
        ...     [jnp.zeros((1, 1, 2))], slot, [kvjax.pallas_kernels.Float8Factor(x)]
        ... )
        >>> (448 * factors[0, 0]).tolist()
        [0.0, 1.0]
    """

    x: Array | DeferredRope


def factor_of(x: Float[Array, "*B H"]) -> Float[Array, "*B"]:
    """Factor of each vector; 0 for the vector 0."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / LARGEST


def codes_of(x: Float[Array, "*B H"], factor: Float[Array, "*B"]) -> Float[Array, "*B H"]:
    """Vectors as 8-bit floats. A code has no gradient."""
    divisor = jnp.where(factor > 0, factor, 1.0)[..., None]
    return jax.lax.stop_gradient(x.astype(jnp.float32) / divisor).astype(FLOAT8)
