"""Argument types of `write_sharded_slots`."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from ..float8 import Float8Codes, Float8Factor
from ..rotary import DeferredRope

Value = Array | DeferredRope | Float8Codes | Float8Factor | int | float
"""A new value of an array, of each sequence and KV head."""


class SlotUpdate(NamedTuple):
    """Arguments of `write_slots` for one of several caches among which a layer's KV heads are divided.

    Attributes:
        arrays, slot, counters: those of this cache's heads.
        values: those of all heads of the layer.
        heads: the layer's KV heads that are in this cache, in order.
        live: rows to write; None writes all rows.

    Example:
        >>> slot, value = jnp.asarray([[2]]), jnp.ones((1, 1, 2))
        >>> update = kvjax.pallas_kernels.SlotUpdate([jnp.zeros((1, 1, 4, 2))], slot, [value], [], heads=(0,))
        >>> kvjax.pallas_kernels.write_sharded_slots([update])[0][0][0, 0, :, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """

    arrays: Sequence[Array]
    slot: Int[Array, "B K"]
    values: Sequence[Value]
    counters: Sequence[Array]
    heads: tuple[int, ...]
    live: Bool[Array, " B"] | None = None
