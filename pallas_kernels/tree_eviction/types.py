"""State type of `tree_eviction`."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Ranked(NamedTuple):
    """The state that an eviction changes.

    Attributes:
        rank: rank of each slot's token among the kept ones, 0 for the oldest; C for free slots.
        pos, weight: position and weight of each slot's token; -1 and 0 for free slots.
        kept: number of kept tokens n. Each rank below n exists once.
        next: slot for the next token.
        scope: rank of the older of the two neighbours, minus the number of sinks.

    Example:
        >>> places, kept, scope = jnp.arange(4)[None, None], jnp.asarray([[4]]), jnp.asarray([[0]])
        >>> ranked = kvjax.pallas_kernels.Ranked(places, places, jnp.ones((1, 1, 4)), kept, kept, scope)
        >>> ranked.rank.ravel().tolist(), ranked.kept.item()  # four tokens, in order
        ([0, 1, 2, 3], 4)
    """

    rank: Int[Array, "B K C"]
    pos: Int[Array, "B K C"]
    weight: Float[Array, "B K C"]
    kept: Int[Array, "B K"]
    next: Int[Array, "B K"]
    scope: Int[Array, "B K"]
