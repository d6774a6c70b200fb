"""What a search for the nearest key gives."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Nearest(NamedTuple):
    """The best key of each query.

    Attributes:
        score: its score in float32, -inf where no key may be chosen.
        place: where it stands; of equally good keys the first, and 0 where none may be chosen.
    """

    score: Float[Array, "*B N"]
    place: Int[Array, "*B N"]
