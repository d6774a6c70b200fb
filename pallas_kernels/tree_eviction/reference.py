"""XLA reference of `tree_eviction`: evict the less attended of two neighbours in each head.

`Op` in `api.py` calls it if no kernel supports the case. The kernel must give equal results.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..ties import exceeds
from .types import Ranked


def tree_eviction(
    ranked: Ranked,
    score: Float[Array, "B K C"],
    steps: Float[Array, "B K C"],
    tree: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    sinks: int,
    stride: int,
    scored: bool,
) -> tuple[Array, ...]:
    """Return the fields of `Ranked` after one eviction in the heads that exceed their budget."""
    rank, count, free = ranked.rank, ranked.kept, ranked.rank.shape[-1]
    over = count > budget[:, None]
    pair = sinks + ranked.scope[..., None] + jnp.arange(2, dtype=jnp.int32)
    # Find the entries of both ranks in one pass over all slots, which writes only its result.
    apart = jnp.abs(rank[:, :, None] - pair[..., None])  # [B, K, 2, C]
    of_slots = score[:, :, None], steps[:, :, None], jnp.arange(free, dtype=jnp.int32)
    entries = [apart, *(jnp.broadcast_to(x, apart.shape) for x in of_slots)]
    none = [jnp.full((), free, jnp.int32), *(jnp.zeros((), x.dtype) for x in of_slots)]
    _, total, queries, places = jax.lax.reduce(entries, none, _nearer, (3,))
    averages = total / jnp.maximum(queries, 1.0)
    newer_goes = exceeds(averages[..., 0], averages[..., 1]) if scored else jnp.ones_like(over)
    victim, slot = (jnp.where(newer_goes, both[..., 1], both[..., 0])[..., None] for both in (pair, places))
    later = over[..., None] & (rank > victim) & (rank < free)
    gone = over[..., None] & (rank == victim)
    return (
        jnp.where(gone, free, rank - later.astype(jnp.int32)),
        jnp.where(gone, -1, ranked.pos),
        jnp.where(gone, 0.0, ranked.weight),
        count - over.astype(jnp.int32),
        jnp.where(over, slot[..., 0], ranked.next),
        jnp.where(over, (ranked.scope + stride) % jnp.maximum(tree[:, None], 1), ranked.scope),
    )


def _nearer(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return the entry with the smaller first number."""
    return [jnp.where(a[0] <= b[0], x, y) for x, y in zip(a, b, strict=True)]
