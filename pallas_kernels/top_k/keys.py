"""Scores as integers of the same order, and the k-th highest of them by bisection. The kernels of this folder use it.

Bisection needs at most 32 passes over a row, which stays in registers or vector memory. Nothing is sorted or moved. In
a short row, two counts fit into one integer. Each pass then cuts the interval to a third, so that 21 passes suffice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..ties import NEAR

LOWEST = -(2**31)
"""Key of padding, below the key of any score."""

HIGHEST = 0x7F800000
"""Key of infinity."""


def ordered(scores: Float[Array, "*B N"]) -> Int[Array, "*B N"]:
    """Return integers that compare like the scores. -0.0 equals 0.0, and NaN is lower than -inf."""
    scores = scores.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # larger magnitude, lower key
    return jnp.where(scores != scores, LOWEST + 1, keys)


SHORT = 2**15 - 1
"""Maximum number of keys whose counts fit into half an integer."""


def highest(keys: Int[Array, "*B N"], count: Int[Array, "..."]) -> Bool[Array, "*B N"]:
    """Return a mask of the `count` highest keys of each row. Ties go to the first.

    Args:
        keys: R rows, or one row.
        count: between 0 and N: [R, 1], or a scalar for one row.
    """
    size = keys.shape[-1]
    kth = threshold(keys, count)
    above, equal = compared(keys, kth)
    room = count - _total(above)
    place = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    earlier = jnp.where(equal, -place, -size)  # the first of equal keys is the highest here
    last = _bisect(earlier, room, jnp.full_like(kth, 1 - size), jnp.full_like(kth, 1))
    return above | ((earlier >= last) & (earlier > -size) & (room > 0))


def compared(keys: Int[Array, "*B N"], kth: Int[Array, "..."]) -> tuple[Bool[Array, "*B N"], Bool[Array, "*B N"]]:
    """Return which keys are above the k-th, and which equal it; see `ties`."""
    low, high = jnp.maximum(kth, LOWEST + NEAR) - NEAR, jnp.minimum(kth, HIGHEST) + NEAR
    return keys > high, (keys >= low) & (keys <= high)


def threshold(
    keys: Int[Array, "*B N"], count: Int[Array, "..."], weights: Int[Array, "*B N"] | None = None
) -> Int[Array, "..."]:
    """Return the `count`-th highest key. If `count` is 0, return a key that is at least as high as all others.

    Args:
        keys: R rows, or one row.
        count: between 0 and N, or the sum of the weights: [R, 1], or a scalar for one row.
        weights: how often each key counts, at least 0; 1 if not given.
    """
    low, top = (reduce(keys, axis=-1, keepdims=keys.ndim > 1) for reduce in (jnp.min, jnp.max))
    found = _bisect(keys, count, low, top + 1, weights)  # may be between keys
    counts = keys >= found if weights is None else (keys >= found) & (weights > 0)
    return jnp.min(jnp.where(counts, keys, top), axis=-1, keepdims=keys.ndim > 1)


def _bisect(keys: Array, count: Array, low: Array, high: Array, weights: Array | None = None) -> Array:
    """Return the highest number with at least `count` keys at or above it. It can be lower if exactly `count` keys are.

    Args:
        keys, count, weights: as for `threshold`.
        low: a number with at least `count` keys at or above it.
        high: a number with fewer than `count` keys at or above it, or none.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # mean, rounded down, without overflow
        found = _total(keys >= middle, weights)
        low, high = jnp.where(found >= count, middle, low), jnp.where(found >= count, high, middle)
        return low, jnp.where(found == count, low + 1, high)  # exactly `count` keys: done

    def leave_a_third(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        third = ((high - low).astype(jnp.uint32) // 3).astype(jnp.int32)  # the difference can overflow int32
        first = low + jnp.maximum(third, 1)
        second = first + third
        both = _sum((keys >= first).astype(jnp.int32) + ((keys >= second).astype(jnp.int32) << 16), keys.ndim > 1)
        of_first, of_second = both & 0xFFFF, both >> 16
        low = jnp.where(of_second >= count, second, jnp.where(of_first >= count, first, low))
        high = jnp.where(of_second >= count, high, jnp.where(of_first >= count, second, first))
        return low, jnp.where((of_first == count) | (of_second == count), low + 1, high)

    def wide(bounds: tuple[Array, Array]) -> Array:
        apart = bounds[0] + 1 < bounds[1]
        return apart if keys.ndim == 1 else jnp.max(apart.astype(jnp.int32)) > 0

    high = jnp.where(_total(keys >= low, weights) == count, low + 1, high)
    narrow = leave_a_third if weights is None and keys.shape[-1] <= SHORT else halve
    return jax.lax.while_loop(wide, narrow, (low, high))[0]


def _total(mask: Array, weights: Array | None = None) -> Array:
    return _sum(mask.astype(jnp.int32) if weights is None else jnp.where(mask, weights, 0), mask.ndim > 1)


def _sum(x: Array, keepdims: bool) -> Array:
    return jnp.sum(x, axis=-1, keepdims=keepdims)
