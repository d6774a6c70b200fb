"""Split the slots of a cache into chunks. `reference.py` and the TPU kernel use it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def from_slot(x: Array, first: Int[Array, " B"], size: int) -> Array:
    """Return `size` entries [B, K, size, ...] of `x` [B, K, S, ...], from slot `first` of each sequence on.

    Indices outside `x` are clipped to its ends.
    """
    index = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    wide = (slice(None), None, slice(None)) + (None,) * (x.ndim - 3)
    return jnp.take_along_axis(x, index[wide], axis=2, mode="clip")


def chunked(
    x: Array, first: Int[Array, " B"], count: Int[Array, " B"], chunk: int
) -> tuple[Array, Bool[Array, "B K N C"]]:
    """Split `x` [B, K, S, ...] into N = ⌈S / C⌉ chunks [B, K, N, C, ...], beginning at slot `first`.

    Returns:
        The chunks, and which of their slots are among the `count` tokens from `first` on.
    """
    batch, heads, slots = x.shape[:3]
    chunks = -(-slots // chunk)
    live = jnp.arange(chunks * chunk, dtype=jnp.int32) < count[:, None, None]
    live = jnp.broadcast_to(live, (batch, heads, chunks * chunk)).reshape(batch, heads, chunks, chunk)
    return from_slot(x, first, chunks * chunk).reshape(*live.shape, *x.shape[3:]), live
