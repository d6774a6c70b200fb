"""The same in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

COSINES = 2**22
"""Cosines of one row that are held at a time: 16 MiB."""


def inverse_lengths(keys: Float[Array, "*B H"], live: Bool[Array, "*B"]) -> Float[Array, "*B"]:
    """One over each key's length, 0 where that is 0; NaN where there is no key, so that no cosine with it is above anything."""
    norm = jnp.linalg.norm(keys.astype(jnp.float32), axis=-1)
    inverse = jnp.where(norm > 0, 1 / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny), 0.0)
    return jnp.where(live, inverse, jnp.nan)


def newest_duplicate(
    keys: Float[Array, "B K T H"], live: Bool[Array, "B K T"], *, threshold: float
) -> Int[Array, "B K T"]:
    """Places of the newest duplicates, a part of the keys after the other, so that nothing of size T × T exists where T is large."""
    batch, heads, count, _ = keys.shape
    inverse, place = inverse_lengths(keys, live), jnp.arange(count, dtype=jnp.int32)
    size = min(count, max(COSINES // (heads * count), 16))

    def find(start: Int[Array, ""]) -> Int[Array, "B K S"]:
        own = start + jnp.arange(size, dtype=jnp.int32)
        some, scale = (jnp.take(x, own, axis=2, mode="clip") for x in (keys, inverse))
        products = jnp.einsum("bkih,bkth->bkit", some, keys, preferred_element_type=jnp.float32)
        similar = products * scale[..., None] * inverse[:, :, None] > threshold
        return jnp.max(jnp.where(similar & (own[:, None] != place), place, -1), axis=-1)

    found = jax.lax.map(find, jnp.arange(-(-count // size), dtype=jnp.int32) * size)
    return jnp.moveaxis(found, 0, 2).reshape(batch, heads, -1)[..., :count]
