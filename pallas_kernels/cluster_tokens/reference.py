"""The same, readably: clusters sorted by score and laid end to end."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..top_k.keys import compared, ordered
from .types import Always


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    always: Always | None = None,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
    """Tokens in the order in which their clusters are taken, and then what is always."""
    highest = jnp.argsort(-scores, axis=-1, stable=True)
    ends = jnp.cumsum(jnp.take_along_axis(sizes[:, :, None], highest, axis=-1), axis=-1, dtype=jnp.int32)
    enough = jnp.minimum(room[:, None, None], ends[..., -1])[..., None]
    last = jnp.take_along_axis(highest, jnp.argmax(ends >= enough, axis=-1, keepdims=True), axis=-1)
    last = jnp.take_along_axis(scores, last, axis=-1)
    equal = compared(ordered(scores), ordered(last))[1]  # to the cluster that fills the room
    ranked = jnp.argsort(-jnp.where(equal, last, scores), axis=-1, stable=True)
    lengths = jnp.take_along_axis(sizes[:, :, None], ranked, axis=-1)
    ends = jnp.cumsum(lengths, axis=-1, dtype=jnp.int32)
    shifts = jnp.take_along_axis(starts[:, :, None], ranked, axis=-1) - (ends - lengths)
    place = jnp.arange(size, dtype=jnp.int32)
    # The one cluster that fills a place, found in one pass over all.
    fills = (place >= (ends - lengths)[..., None]) & (place < ends[..., None])  # [B, K, G, M, S]
    nth = place + jnp.sum(jnp.where(fills, shifts[..., None], 0), axis=-2, dtype=jnp.int32)
    live = place < jnp.minimum(ends[..., -1:], room[:, None, None, None])
    index = jnp.take_along_axis(order[:, :, None], jnp.where(live, nth, 0), axis=-1, mode="clip")
    if always is None:
        return index, live
    pos = jnp.arange(always.places - size, dtype=jnp.int32)
    held = pos < always.first + always.latest
    pos = jnp.where(pos < always.first, pos, always.tail[:, None] + pos - always.first)
    held &= pos < always.seen[:, None]
    pos = jnp.minimum(pos, order.shape[-1] - 1)
    pos, held = (jnp.broadcast_to(x[:, None, None], (*index.shape[:3], x.shape[-1])) for x in (pos, held))
    return jnp.concatenate([index, pos], axis=-1), jnp.concatenate([live, held], axis=-1)
