"""Result type of `nearest`."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Nearest(NamedTuple):
    """The best key of each query.

    Attributes:
        score: the key's score in float32, -inf if all keys are excluded.
        place: the key's index; the first of equal keys, and 0 if all keys are excluded.
    """

    score: Float[Array, "*B N"]
    place: Int[Array, "*B N"]
