"""The highest scores of every row in plain XLA, by sorting."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .keys import compared, ordered


def top_k(scores: Float[Array, "*B N"], count: Int[Array, "*B"]) -> Bool[Array, "*B N"]:
    """Which are the `count` highest scores of each row; of equal ones the first."""
    size = scores.shape[-1]
    keys, count = ordered(scores), jnp.clip(count, 0, size)[..., None]
    kth = jnp.take_along_axis(jnp.sort(keys, axis=-1), jnp.minimum(size - count, size - 1), axis=-1)
    above, equal = compared(keys, kth)
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above & (count > 0) | equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)


def top_k_indices(
    scores: Float[Array, "*B N"], count: Int[Array, "*B"], size: int
) -> tuple[Int[Array, "*B S"], Bool[Array, "*B S"]]:
    """Places of the `count` highest scores of each row, the highest first, and after them any others; and which are meant."""
    scores = jnp.where(scores == 0, 0.0, scores.astype(jnp.float32))  # XLA has -0.0 below 0.0
    scores = jnp.where(scores != scores, -jnp.inf, scores)
    last = jnp.clip(count, 1, size)[..., None] - 1
    kth = jnp.take_along_axis(jax.lax.top_k(scores, size)[0], last, axis=-1)
    equal = compared(ordered(scores), ordered(kth))[1]
    top, index = jax.lax.top_k(jnp.where(equal, kth, scores), size)
    live = (top > -jnp.inf) & (jnp.arange(size, dtype=jnp.int32) < count[..., None])
    return index.astype(jnp.int32), live
