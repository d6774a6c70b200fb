"""Places cut into chunks."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def from_place(x: Array, first: Int[Array, " B"], size: int) -> Array:
    """`size` entries [B, K, size, ...] of `x` [B, K, S, ...] from each row's place `first` on; beyond its ends, the nearest."""
    index = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    wide = (slice(None), None, slice(None)) + (None,) * (x.ndim - 3)
    return jnp.take_along_axis(x, index[wide], axis=2, mode="clip")


def chunked(
    x: Array, first: Int[Array, " B"], count: Int[Array, " B"], chunk: int
) -> tuple[Array, Bool[Array, "B K N C"]]:
    """`x` [B, K, S, ...] in chunks [B, K, N, C, ...], N = ⌈S / C⌉, the first of which begins at `first`; and what is among `count`."""
    batch, heads, places = x.shape[:3]
    chunks = -(-places // chunk)
    live = jnp.arange(chunks * chunk, dtype=jnp.int32) < count[:, None, None]
    live = jnp.broadcast_to(live, (batch, heads, chunks * chunk)).reshape(batch, heads, chunks, chunk)
    return from_place(x, first, chunks * chunk).reshape(*live.shape, *x.shape[3:]), live
