"""Index arithmetic for a layer whose KV heads are divided among several caches. Kernels use it.

The functions compare against static head numbers, so that a kernel does not read a lookup table from memory. `heads` is
always the static list of a layer's KV heads that one cache has.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Int


def is_among(head: Int[Array, ""], heads: Sequence[int]) -> Bool[Array, ""]:
    """Return whether KV head `head` of the layer is in `heads`."""
    found = head == heads[0]
    for other in heads[1:]:
        found |= head == other
    return found


def place_among(head: Int[Array, ""], heads: Sequence[int]) -> Int[Array, ""]:
    """Return the index of KV head `head` in `heads`. The result is arbitrary if it is not there."""
    if tuple(heads) == tuple(range(len(heads))):
        return head
    return _looked_up(head, {other: place for place, other in enumerate(heads)})


def head_at(place: Int[Array, ""], heads: Sequence[int]) -> Int[Array, ""]:
    """Return the KV head of the layer at index `place` of `heads`."""
    if tuple(heads) == tuple(range(len(heads))):
        return place
    return _looked_up(place, dict(enumerate(heads)))


def query_heads(heads: Sequence[int] | np.ndarray, group: int) -> np.ndarray:
    """Return the indices of the query heads that read these KV heads, `group` each, in order."""
    return (np.asarray(heads)[:, None] * group + np.arange(group)).reshape(-1)


def _looked_up(key: Int[Array, ""], table: dict[int, int]) -> Int[Array, ""]:
    found = key * 0
    for one, value in table.items():
        found += (key == one).astype(np.int32) * value
    return found
