"""What every query reads besides the clusters that it selects."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Always(NamedTuple):
    """Tokens that every query takes besides, in places after those of its clusters.

    Attributes:
        first: how many of a row's first tokens.
        latest: places for its latest ones.
        tail: the position that these begin at.
        seen: tokens of each row.
        places: for all together: those of clusters, `first`, `latest`, and some that nothing is meant in.
    """

    first: int
    latest: int
    tail: Int[Array, " B"]
    seen: Int[Array, " B"]
    places: int
