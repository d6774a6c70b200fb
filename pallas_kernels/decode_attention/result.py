"""What decode attention takes besides queries and cache, and what it gives."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Rotation(NamedTuple):
    """Rotary embedding of cached keys by a place that may change from step to step, applied while they are read.

    Channel i of the first half of a head pairs with channel i of the second half, as in Llama.

    Attributes:
        place: which row of the tables each slot's key is rotated by.
        cos, sin: of each pair's angle at P places, in float32.
    """

    place: Int[Array, "B K C"]
    cos: Float[Array, "P R"]
    sin: Float[Array, "P R"]


class Attended(NamedTuple):
    """Attention of one query a row over a cache.

    Attributes:
        out: attended values, in the dtype of the queries; zeros where nothing is live.
        logsumexp: of each query head's logits, in float32; -inf where nothing is live. Attention over two caches is their
            results weighted by its exponential.
        probs: each slot's probability, averaged over the query heads of its group, in float32; None unless asked for.
    """

    out: Float[Array, "B N H"]
    logsumexp: Float[Array, "B N"]
    probs: Float[Array, "B K C"] | None
