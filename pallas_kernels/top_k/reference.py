"""XLA reference of `top_k`, `top_k_indices` and `cluster_tokens`, which sorts.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must choose the same entries, in any order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .keys import compared, ordered
from .types import Always


def top_k(scores: Float[Array, "*B N"], count: Int[Array, "*B"]) -> Bool[Array, "*B N"]:
    """Return a mask of the `count` highest scores of each row. Ties go to the first."""
    size = scores.shape[-1]
    keys, count = ordered(scores), jnp.clip(count, 0, size)[..., None]
    kth = jnp.take_along_axis(jnp.sort(keys, axis=-1), jnp.minimum(size - count, size - 1), axis=-1)
    above, equal = compared(keys, kth)
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above & (count > 0) | equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)


def top_k_indices(
    scores: Float[Array, "*B N"], count: Int[Array, "*B"], size: int
) -> tuple[Int[Array, "*B S"], Bool[Array, "*B S"]]:
    """Return the indices of the `count` highest scores of each row, highest first, then others; and a mask of the
    chosen ones.
    """
    scores = jnp.where(scores == 0, 0.0, scores.astype(jnp.float32))  # XLA sorts -0.0 below 0.0
    scores = jnp.where(scores != scores, -jnp.inf, scores)
    last = jnp.clip(count, 1, size)[..., None] - 1
    kth = jnp.take_along_axis(jax.lax.top_k(scores, size)[0], last, axis=-1)
    equal = compared(ordered(scores), ordered(kth))[1]
    top, index = jax.lax.top_k(jnp.where(equal, kth, scores), size)
    live = (top > -jnp.inf) & (jnp.arange(size, dtype=jnp.int32) < count[..., None])
    return index.astype(jnp.int32), live


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
    always: Always | None = None,
) -> tuple[Int[Array, "B K G P"], Bool[Array, "B K G P"]]:
    """Choose tokens, in the order in which their clusters are taken, followed by those that are always added."""
    highest = jnp.argsort(-scores, axis=-1, stable=True)
    ends = jnp.cumsum(jnp.take_along_axis(sizes[:, :, None], highest, axis=-1), axis=-1, dtype=jnp.int32)
    enough = jnp.minimum(room[:, None, None], ends[..., -1])[..., None]
    last = jnp.take_along_axis(highest, jnp.argmax(ends >= enough, axis=-1, keepdims=True), axis=-1)
    last = jnp.take_along_axis(scores, last, axis=-1)
    equal = compared(ordered(scores), ordered(last))[1]  # equal to the cluster that reaches the limit
    ranked = jnp.argsort(-jnp.where(equal, last, scores), axis=-1, stable=True)
    lengths = jnp.take_along_axis(sizes[:, :, None], ranked, axis=-1)
    ends = jnp.cumsum(lengths, axis=-1, dtype=jnp.int32)
    shifts = jnp.take_along_axis(starts[:, :, None], ranked, axis=-1) - (ends - lengths)
    place = jnp.arange(size, dtype=jnp.int32)
    # The cluster of each result, found in one pass over all clusters.
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
