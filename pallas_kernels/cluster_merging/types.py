"""What merging works on."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Clusters(NamedTuple):
    """Tokens and clusters of tokens, in order.

    Attributes:
        k, v: keys and values; of a cluster, the means over its tokens.
        pos: original position, of a cluster that of its newest token.
        weight: how many tokens each stands for.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pos: Int[Array, "B K S"]
    weight: Float[Array, "B K S"]
