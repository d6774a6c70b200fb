"""The queries of an observation window."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class Observers(NamedTuple):
    """The last queries of each sequence, by KV head: G query heads for each of w tokens.

    Attributes:
        q: rotated queries.
        pos: positions of the queries, negative if a sequence has fewer than w tokens.
        size: number of observing tokens per sequence.
        sinks: logit of each query head's attention sink, if there are any.
    """

    q: Float[Array, "B K w G H"]
    pos: Int[Array, "B w"]
    size: Int[Array, " B"]
    sinks: Float[Array, "K G"] | None = None

    @classmethod
    def of(
        cls,
        q: Float[Array, "B S N H"],
        lengths: Int[Array, " B"],
        window: int,
        kv_heads: int,
        pos: Int[Array, "B #K T"] | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> "Observers":
        """Return the last `window` queries of prompts of these lengths; `pos` and `sinks` are as for `window_scores`."""
        batch, size, heads, dim = q.shape
        place = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)
        before = 0 if pos is None else pos.shape[-1] - size  # places without a query
        rows = jnp.take_along_axis(q, jnp.clip(place - before, 0)[:, :, None, None], axis=1)
        rows = rows.reshape(batch, window, kv_heads, heads // kv_heads, dim)
        if pos is not None:
            found = jnp.take_along_axis(pos[:, 0], jnp.maximum(place, 0), axis=1)
            place = jnp.where(place >= before, found, -1)
        sinks = sinks if sinks is None else sinks.reshape(kv_heads, -1)
        return cls(jnp.swapaxes(rows, 1, 2), place, jnp.minimum(lengths - before, window), sinks)


def from_first(x: Shaped[Array, "B T ..."], first: Int[Array, " B"] | None) -> Shaped[Array, "B T ..."]:
    """Shift the token axis so that each sequence begins with token `first`; return `x` unchanged if `first` is None."""
    if first is None:
        return x
    source = jnp.minimum(first[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[1] - 1)
    return jnp.take_along_axis(x, source.reshape(*source.shape, *[1] * (x.ndim - 2)), axis=1)
