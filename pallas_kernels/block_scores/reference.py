"""XLA reference of `page_scores`, `widen_bounds` and `centroid_scores`, the scores of pages and clusters of keys.

`Op` in `api.py` calls it if no kernel supports the case. All other implementations must match it up to rounding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotary import DeferredRope, heads_of


def page_scores(
    q: Float[Array, "B N H"] | DeferredRope, bounds: Float[Array, "B K P W"], tokens: Int[Array, " B"], *, page: int
) -> Float[Array, "B N P"]:
    """Use the upper bound of a channel where the query is positive, and the lower bound elsewhere."""
    q = heads_of(q)
    batch, heads, dim = q.shape
    kv_heads, size = bounds.shape[1:3]
    zero = jnp.zeros((), q.dtype)
    parts = jnp.concatenate([jnp.minimum(q, zero), jnp.maximum(q, zero)], axis=-1)
    parts = parts.reshape(batch, kv_heads, -1, 2 * dim)
    scores = jnp.einsum("bkgh,bkph->bkgp", parts, bounds, preferred_element_type=jnp.float32)
    there = page * jnp.arange(size, dtype=jnp.int32) < tokens[:, None]
    return jnp.where(there[:, None], scores.reshape(batch, heads, size), -jnp.inf)


def widen_bounds(
    bounds: Float[Array, "B K P W"], key: Float[Array, "B K H"] | DeferredRope, pos: Int[Array, " B"], *, page: int
) -> Float[Array, "B K P W"]:
    """Extend the bounds of each sequence's newest page by one key."""
    key = heads_of(key).astype(bounds.dtype)
    rows, number = jnp.arange(len(pos), dtype=jnp.int32), pos // page
    low, high = jnp.split(bounds[rows, :, number], 2, axis=-1)
    wider = jnp.concatenate([jnp.minimum(low, key), jnp.maximum(high, key)], axis=-1)
    first = (pos % page == 0)[:, None, None]
    return bounds.at[rows, :, number].set(jnp.where(first, jnp.tile(key, 2), wider))


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope, centroids: Float[Array, "B K M H"]
) -> Float[Array, "B K G M"]:
    """Multiply and add in float32, without matrix units."""
    batch, kv_heads, _, dim = centroids.shape
    q = heads_of(q).reshape(batch, kv_heads, -1, dim).astype(jnp.float32)
    return jnp.sum(q[:, :, :, None] * centroids[:, :, None], axis=-1)
