"""The same, readably."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotary import DeferredRope, heads_of


def page_scores(
    q: Float[Array, "B N H"] | DeferredRope, bounds: Float[Array, "B K P W"], tokens: Int[Array, " B"], *, page: int
) -> Float[Array, "B N P"]:
    """A channel's larger product is with its upper bound where the query is positive, and with the lower elsewhere."""
    q = heads_of(q)
    batch, heads, dim = q.shape
    kv_heads, size = bounds.shape[1:3]
    zero = jnp.zeros((), q.dtype)
    parts = jnp.concatenate([jnp.minimum(q, zero), jnp.maximum(q, zero)], axis=-1)
    parts = parts.reshape(batch, kv_heads, -1, 2 * dim)
    scores = jnp.einsum("bkgh,bkph->bkgp", parts, bounds, preferred_element_type=jnp.float32)
    there = page * jnp.arange(size, dtype=jnp.int32) < tokens[:, None]
    return jnp.where(there[:, None], scores.reshape(batch, heads, size), -jnp.inf)
