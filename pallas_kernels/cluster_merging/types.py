"""Argument and result type of cluster merging."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Clusters(NamedTuple):
    """Tokens and clusters of tokens, in order of position.

    Attributes:
        k, v: keys and values; for a cluster, the means over its tokens.
        pos: original position; for a cluster, the position of its newest token.
        weight: number of tokens that each entry represents.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pos: Int[Array, "B K S"]
    weight: Float[Array, "B K S"]
