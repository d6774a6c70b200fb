"""The same, readably: clusters sorted by score and laid end to end."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cluster_tokens(
    scores: Float[Array, "B K G M"],
    sizes: Int[Array, "B K M"],
    starts: Int[Array, "B K M"],
    order: Int[Array, "B K C"],
    room: Int[Array, " B"],
    size: int,
) -> tuple[Int[Array, "B K G S"], Bool[Array, "B K G S"]]:
    """Tokens in the order in which their clusters are taken."""
    ranked = jnp.argsort(-scores, axis=-1, stable=True)
    lengths = jnp.take_along_axis(sizes[:, :, None], ranked, axis=-1)
    ends = jnp.cumsum(lengths, axis=-1, dtype=jnp.int32)
    shifts = jnp.take_along_axis(starts[:, :, None], ranked, axis=-1) - (ends - lengths)
    place = jnp.arange(size, dtype=jnp.int32)
    # The one cluster that fills a place, found in one pass over all.
    fills = (place >= (ends - lengths)[..., None]) & (place < ends[..., None])  # [B, K, G, M, S]
    nth = place + jnp.sum(jnp.where(fills, shifts[..., None], 0), axis=-2, dtype=jnp.int32)
    live = place < jnp.minimum(ends[..., -1:], room[:, None, None, None])
    return jnp.take_along_axis(order[:, :, None], jnp.where(live, nth, 0), axis=-1, mode="clip"), live
