"""Argument type of `write_sharded_slots`."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from ..rotary import DeferredRope


class SlotUpdate(NamedTuple):
    """Arguments of `write_slots` for one of several caches among which a layer's KV heads are divided.

    Attributes:
        arrays, slot, counters: those of this cache's heads.
        values: those of all heads of the layer.
        heads: the layer's KV heads that are in this cache, in order.
        live: rows to write; None writes all rows.
    """

    arrays: Sequence[Array]
    slot: Int[Array, "B K"]
    values: Sequence[Array | DeferredRope | int | float]
    counters: Sequence[Array]
    heads: tuple[int, ...]
    live: Bool[Array, " B"] | None = None
