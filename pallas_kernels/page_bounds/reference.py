"""The same, readably."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotary import DeferredRope, heads_of


def widen_bounds(
    bounds: Float[Array, "B K P W"], key: Float[Array, "B K H"] | DeferredRope, pos: Int[Array, " B"], *, page: int
) -> Float[Array, "B K P W"]:
    """The bounds of each row's newest page, further apart by one key."""
    key = heads_of(key).astype(bounds.dtype)
    rows, number = jnp.arange(len(pos), dtype=jnp.int32), pos // page
    low, high = jnp.split(bounds[rows, :, number], 2, axis=-1)
    wider = jnp.concatenate([jnp.minimum(low, key), jnp.maximum(high, key)], axis=-1)
    first = (pos % page == 0)[:, None, None]
    return bounds.at[rows, :, number].set(jnp.where(first, jnp.tile(key, 2), wider))
