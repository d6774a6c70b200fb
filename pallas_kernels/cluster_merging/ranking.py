"""Ranks: edges as integers, ordered by similarity and then by target, earlier targets higher.

One maximum over ranks thus finds the best edge, and the first of equal ones. The kernels of `chunk_similarity` use
them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kmeans import Nearest
from .reference import RESOLUTION

MOST = 1 << 16
"""Number of targets that a rank can encode."""

NONE = jnp.iinfo(jnp.int32).min
"""Rank of a missing edge, below all other ranks."""

_INTEGERS = 1.5 * 2.0**23
"""Adding this to a small float32 leaves its integer value, rounded to even, in the lowest bits."""


def rank(product: Array, even: Array, odd: Array, target: Array) -> Int[Array, "X Y"]:
    """Return ranks: 16 bits of cosine, in units of `RESOLUTION`, above 16 bits that are larger for earlier targets.

    Args:
        product: inner products of keys at even and odd slots, one parity along each axis.
        even, odd: inverse norms of these keys, broadcastable to `product`.
        target: index of the edge's odd slot, less than `MOST`, broadcastable to `product`.
    """
    rounded = product * even * (odd * (1 / RESOLUTION)) + _INTEGERS
    return (jax.lax.bitcast_convert_type(rounded, jnp.int32) << 16) | (MOST - 1 - target)


def inverse_length(keys: Float[Array, "P H"]) -> Float[Array, " P"]:
    """Return one over each key's Euclidean norm, and 0 for keys of norm 0."""
    square = jnp.sum(jnp.square(keys.astype(jnp.float32)), axis=-1)
    return jnp.where(square > 0, jax.lax.rsqrt(square), 0.0)


def unrank(best: Int[Array, "*B A"]) -> Nearest:
    """Return the edges that ranks encode."""
    exists = best != NONE
    score = jnp.where(exists, (best >> 16).astype(jnp.float32) * RESOLUTION, -jnp.inf)
    return Nearest(score, jnp.where(exists, MOST - 1 - (best & (MOST - 1)), 0))
