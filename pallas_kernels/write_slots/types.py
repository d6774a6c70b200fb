"""What is written where."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Int

from ..rotary import DeferredRope


class SlotUpdate(NamedTuple):
    """What `write_slots` takes, for one of several caches among which a layer's KV heads are divided.

    Attributes:
        arrays, slot, counters: of this cache's heads.
        values: of all heads of the layer.
        heads: which of them this cache has, in its order.
    """

    arrays: Sequence[Array]
    slot: Int[Array, "B K"]
    values: Sequence[Array | DeferredRope | int | float]
    counters: Sequence[Array]
    heads: tuple[int, ...]
