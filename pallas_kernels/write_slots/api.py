"""The public function, and the choice of who computes it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..op import Implementation, Op
from ..rotary import DeferredRope
from .types import SlotUpdate

_OP = Op("write_slots", __name__, gpu=("pallas_triton",), forward_only=True)


def write_slots(
    arrays: Sequence[Array],
    slot: Int[Array, "B K"],
    values: Sequence[Array | DeferredRope | int | float],
    counters: Sequence[Array] = (),
    *,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Array]:
    """Arrays with a new value in one slot a row and KV head, in place where the arrays are not used again.

    A scatter an array is a kernel each in XLA, of which the launch takes longer than the writing; a Pallas kernel writes all at once.

    Args:
        arrays: [B, K, C] or [B, K, C, H] each, all of the same B, K and C.
        slot: which, at least 0; where it is C or more, nothing is written.
        values: for each array [B, K] or [B, K, H], or anything that broadcasts to that; `DeferredRope` to be rotated before it is written.
        counters: integers [B, K] or [B], to be made greater by one; `slot` may be among them.
        implementation: "auto" takes the device's Pallas kernel where it serves.
        interpret: run a Pallas kernel in its interpreter, on any device.

    Returns:
        The arrays, and after them the counters.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    whole = SlotUpdate(arrays, slot, values, counters, tuple(range(slot.shape[1])))
    return write_sharded_slots([whole], implementation=implementation, interpret=interpret)[0]


def write_sharded_slots(
    writings: Sequence[SlotUpdate], *, implementation: Implementation = "auto", interpret: bool = False
) -> list[list[Array]]:
    """`write_slots` in several caches at once, among which a layer's KV heads are divided.

    Args:
        writings: one a cache; each head is in one of them.
        implementation, interpret: as for `write_slots`.

    Returns:
        For each cache the arrays, and after them the counters.

    Raises:
        Unsupported: an implementation was named that does not serve.
    """
    return _OP(writings, implementation=implementation, interpret=interpret)


def writes_host_memory(array: Array) -> bool:
    """Whether `write_slots` takes a kernel for such an array, hence one in the host's memory too, which a GPU writes over the bus, in place."""
    shape = jax.ShapeDtypeStruct(array.shape[:2], jnp.int32)
    whole = SlotUpdate([array], shape, [0.0], (), tuple(range(array.shape[1])))  # pyright: ignore[reportArgumentType]
    return _OP.kernel([whole]) is not None
