"""Argument type of `cluster_tokens`."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Always(NamedTuple):
    """Tokens that every query reads in addition to those of its clusters. They follow those in the result.

    Attributes:
        first: number of a sequence's first tokens.
        latest: maximum number of its latest tokens.
        tail: position of the first of the latest tokens.
        seen: number of tokens per sequence.
        places: length of the whole result: tokens of clusters, `first`, `latest` and padding.
    """

    first: int
    latest: int
    tail: Int[Array, " B"]
    seen: Int[Array, " B"]
    places: int
