"""What an eviction of TreeKV works on."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Ranked(NamedTuple):
    """What an eviction changes of a cache.

    Attributes:
        rank: place of a slot's token among those kept, 0 for the oldest; C where free.
        pos, weight: of the token in a slot, -1 and 0 where free.
        kept: how many tokens are, each rank below it once.
        next: the slot that the next token goes to.
        scope: rank of the older of the two neighbours, less the sinks.
    """

    rank: Int[Array, "B K C"]
    pos: Int[Array, "B K C"]
    weight: Float[Array, "B K C"]
    kept: Int[Array, "B K"]
    next: Int[Array, "B K"]
    scope: Int[Array, "B K"]
