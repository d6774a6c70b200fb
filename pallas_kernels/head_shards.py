"""A layer's KV heads divided among caches, as a program finds its way: by comparing, without reading a table from memory."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Int


def is_among(head: Int[Array, ""], heads: Sequence[int]) -> Bool[Array, ""]:
    """Whether a head of the layer is one of these."""
    found = head == heads[0]
    for other in heads[1:]:
        found |= head == other
    return found


def place_among(head: Int[Array, ""], heads: Sequence[int]) -> Int[Array, ""]:
    """Its place among these; anything if it is none of them."""
    if tuple(heads) == tuple(range(len(heads))):
        return head
    return _looked_up(head, {other: place for place, other in enumerate(heads)})


def head_at(place: Int[Array, ""], heads: Sequence[int]) -> Int[Array, ""]:
    """The head of the layer that has this place among these."""
    if tuple(heads) == tuple(range(len(heads))):
        return place
    return _looked_up(place, dict(enumerate(heads)))


def query_heads(heads: Sequence[int] | np.ndarray, group: int) -> np.ndarray:
    """Query heads that read these KV heads, `group` each, in their order."""
    return (np.asarray(heads)[:, None] * group + np.arange(group)).reshape(-1)


def _looked_up(key: Int[Array, ""], table: dict[int, int]) -> Int[Array, ""]:
    found = key * 0
    for one, value in table.items():
        found += (key == one).astype(np.int32) * value
    return found
