"""Scores as integers in the same order, and the kth highest of them found by bisection: what the kernels share.

Halving the interval that holds the kth key takes at most 32 passes over a row, whatever it holds, and a row stays in registers
or vector memory meanwhile. Nothing is sorted and nothing moves. Of a row short enough that two counts fit into one number, a pass
leaves a third of the interval: 21 passes at most.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..ties import NEAR

LOWEST = -(2**31)
"""Below the key of any score: what is not there."""

HIGHEST = 0x7F800000
"""The key of infinity."""


def ordered(scores: Float[Array, "*B N"]) -> Int[Array, "*B N"]:
    """Integers that compare like the scores: -0.0 equals 0.0, and NaN is lower than -inf."""
    scores = scores.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # larger magnitude, lower key
    return jnp.where(scores != scores, LOWEST + 1, keys)


SHORT = 2**15 - 1
"""Keys whose counts fit into half a number."""


def highest(keys: Int[Array, "*B N"], count: Int[Array, "..."]) -> Bool[Array, "*B N"]:
    """Which are the `count` highest keys of each row; of equal ones the first.

    Args:
        keys: R rows, or one row alone.
        count: between 0 and N: [R, 1], or a scalar for one row.
    """
    size = keys.shape[-1]
    kth = threshold(keys, count)
    above, equal = compared(keys, kth)
    room = count - _total(above)
    place = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    earlier = jnp.where(equal, -place, -size)  # a first equal key is the highest here
    last = _bisect(earlier, room, jnp.full_like(kth, 1 - size), jnp.full_like(kth, 1))
    return above | ((earlier >= last) & (earlier > -size) & (room > 0))


def compared(keys: Int[Array, "*B N"], kth: Int[Array, "..."]) -> tuple[Bool[Array, "*B N"], Bool[Array, "*B N"]]:
    """Which keys are above the kth, and which equal it; see `ties`."""
    low, high = jnp.maximum(kth, LOWEST + NEAR) - NEAR, jnp.minimum(kth, HIGHEST) + NEAR
    return keys > high, (keys >= low) & (keys <= high)


def threshold(
    keys: Int[Array, "*B N"], count: Int[Array, "..."], weights: Int[Array, "*B N"] | None = None
) -> Int[Array, "..."]:
    """The key that is number `count` from the highest; of none, any that is no lower than all.

    Args:
        keys: R rows, or one row alone.
        count: between 0 and N, or the sum of the weights: [R, 1], or a scalar for one row.
        weights: how many keys each stands for, 0 or more; one, if not given.
    """
    low, top = (reduce(keys, axis=-1, keepdims=keys.ndim > 1) for reduce in (jnp.min, jnp.max))
    found = _bisect(keys, count, low, top + 1, weights)  # may lie between keys
    counts = keys >= found if weights is None else (keys >= found) & (weights > 0)
    return jnp.min(jnp.where(counts, keys, top), axis=-1, keepdims=keys.ndim > 1)


def _bisect(keys: Array, count: Array, low: Array, high: Array, weights: Array | None = None) -> Array:
    """The highest key of which there are `count` or more keys at or above it, or a number between keys if just `count` are.

    Args:
        low: there are at least `count` keys at or above it.
        high: there are fewer than `count` there, or none.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without overflow
        found = _total(keys >= middle, weights)
        low, high = jnp.where(found >= count, middle, low), jnp.where(found >= count, high, middle)
        return low, jnp.where(found == count, low + 1, high)  # exactly these: no need to look closer

    def leave_a_third(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        third = ((high - low).astype(jnp.uint32) // 3).astype(jnp.int32)  # may be too far apart for the sign
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
