"""The queries of an observation window."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Observers(NamedTuple):
    """The last queries of each row, by the KV head that they read: G for each of w tokens.

    Attributes:
        q: rotated queries.
        pos: their positions, negative where a row has fewer than w tokens.
        size: how many tokens of a row observe.
    """

    q: Float[Array, "B K w G H"]
    pos: Int[Array, "B w"]
    size: Int[Array, " B"]

    @classmethod
    def of(cls, q: Float[Array, "B T N H"], lengths: Int[Array, " B"], window: int, kv_heads: int) -> "Observers":
        """The last `window` queries of prompts of these lengths."""
        batch, _, heads, dim = q.shape
        pos = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)
        rows = jnp.take_along_axis(q, jnp.maximum(pos, 0)[:, :, None, None], axis=1)
        rows = rows.reshape(batch, window, kv_heads, heads // kv_heads, dim)
        return cls(jnp.swapaxes(rows, 1, 2), pos, jnp.minimum(lengths, window))


def from_first(k: Float[Array, "B T K H"], first: Int[Array, " B"] | None) -> Float[Array, "B T K H"]:
    """Keys with each row's token `first` before all others; as they are where that is None."""
    if first is None:
        return k
    source = jnp.minimum(first[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[1] - 1)
    return jnp.take_along_axis(k, source[:, :, None, None], axis=1)
