"""The highest scores of every row in plain XLA, by sorting."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .keys import ordered


def top_k(scores: Float[Array, "*B N"], count: Int[Array, "*B"]) -> Bool[Array, "*B N"]:
    """Which are the `count` highest scores of each row; of equal ones the first."""
    size = scores.shape[-1]
    keys, count = ordered(scores), jnp.clip(count, 0, size)[..., None]
    kth = jnp.take_along_axis(jnp.sort(keys, axis=-1), jnp.minimum(size - count, size - 1), axis=-1)
    above, equal = keys > kth, keys == kth
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above & (count > 0) | equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)
