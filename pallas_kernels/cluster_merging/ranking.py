"""Similarities as integers that also say where an edge leads, so that one maximum finds the best and the first of equals."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kmeans import Nearest
from .reference import RESOLUTION

MOST = 1 << 16
"""Places that an edge can lead to."""

NONE = jnp.iinfo(jnp.int32).min
"""Rank of an edge that does not exist, below all others."""

_INTEGERS = 1.5 * 2.0**23
"""Added to a small float32, leaves it as an integer (ties to even) in the lowest bits."""


def rank(product: Array, even: Array, odd: Array, target: Array) -> Int[Array, "X Y"]:
    """Sixteen bits of cosine, in units of `RESOLUTION`, above sixteen that are the larger the earlier the target.

    Args:
        product: inner products of keys at even and odd places, X along one axis and Y along the other.
        even, odd: one over the lengths of these keys, to be broadcast against the products.
        target: where an edge leads, less than `MOST`, likewise.
    """
    rounded = product * even * (odd * (1 / RESOLUTION)) + _INTEGERS
    return (jax.lax.bitcast_convert_type(rounded, jnp.int32) << 16) | (MOST - 1 - target)


def inverse_length(keys: Float[Array, "P H"]) -> Float[Array, " P"]:
    """One over a key's length, 0 where that is 0."""
    square = jnp.sum(jnp.square(keys.astype(jnp.float32)), axis=-1)
    return jnp.where(square > 0, jax.lax.rsqrt(square), 0.0)


def unrank(best: Int[Array, "*B A"]) -> Nearest:
    """The edges that ranks stand for."""
    exists = best != NONE
    score = jnp.where(exists, (best >> 16).astype(jnp.float32) * RESOLUTION, -jnp.inf)
    return Nearest(score, jnp.where(exists, MOST - 1 - (best & (MOST - 1)), 0))
