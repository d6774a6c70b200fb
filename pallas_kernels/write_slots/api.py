"""Public functions. Their `Op` picks the Triton kernel or XLA."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..op import Implementation, Op
from .types import SlotUpdate, Value

_OP = Op("write_slots", __name__, gpu=("pallas_triton",))


def write_slots(
    arrays: Sequence[Array],
    slot: Int[Array, "B K"],
    values: Sequence[Value],
    counters: Sequence[Array] = (),
    *,
    live: Bool[Array, " B"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> list[Array]:
    """Write a new value into one slot per sequence and KV head of each array, in place if the arrays are not used
    again.

    XLA uses one scatter kernel per array, which takes longer to launch than to run. The Pallas kernel writes all arrays
    at once.

    Args:
        arrays: arrays [B, K, C] or [B, K, C, H], with the same B, K and C.
        slot: slot to write, at least 0. Nothing is written if it is C or more.
        values: per array, [B, K] or [B, K, H] or anything that broadcasts to it. A `DeferredRope` is rotated before it
            is written. `Float8Codes` writes vectors as 8-bit floats, and `Float8Factor` writes their factors. A
            deferred rotation is applied first.
        counters: integers [B, K] or [B] to increment by one. `slot` can be one of them.
        live: rows to write. Arrays and counters of other rows do not change. None writes all rows.
        implementation: "auto" picks the GPU's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        The arrays, followed by the counters.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> k, next_slot = jnp.zeros((1, 1, 4, 2)), jnp.asarray([[2]])
        >>> k, next_slot = kvjax.pallas_kernels.write_slots([k], next_slot, [jnp.ones((1, 1, 2))], [next_slot])
        >>> k[0, 0, :, 0].tolist(), next_slot.item()
        ([0.0, 0.0, 1.0, 0.0], 3)
    """
    whole = SlotUpdate(arrays, slot, values, counters, tuple(range(slot.shape[1])), live)
    return write_sharded_slots([whole], implementation=implementation, interpret=interpret)[0]


def write_sharded_slots(
    writings: Sequence[SlotUpdate], *, implementation: Implementation = "auto", interpret: bool = False
) -> list[list[Array]]:
    """Apply `write_slots` to several caches at once, among which a layer's KV heads are divided.

    Args:
        writings: one per cache; each head is in exactly one of them.
        implementation, interpret: as for `write_slots`.

    Returns:
        Per cache, the arrays followed by the counters.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> value, slot = jnp.asarray([[[1.0], [2.0]]]), jnp.asarray([[1]])  # two heads, each with a cache
        >>> SlotUpdate, array = kvjax.pallas_kernels.SlotUpdate, jnp.zeros((1, 1, 3, 1))
        >>> updates = [SlotUpdate([array], slot + i, [value], [], heads=(i,)) for i in range(2)]
        >>> [array.ravel().tolist() for (array,) in kvjax.pallas_kernels.write_sharded_slots(updates)]
        [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]
    """
    return _OP(writings, implementation=implementation, interpret=interpret)


def writes_host_memory(array: Array) -> bool:
    """Return whether `write_slots` uses a kernel for such an array, so that it can also be in host memory.

    A GPU writes to host memory in place, over the bus.

    Example:
        >>> kvjax.pallas_kernels.writes_host_memory(jnp.zeros((1, 1, 8, 4)))  # on CPU
        False
    """
    shape = jax.ShapeDtypeStruct(array.shape[:2], jnp.int32)
    whole = SlotUpdate([array], shape, [0.0], (), tuple(range(array.shape[1])))  # pyright: ignore[reportArgumentType]
    return _OP.kernel([whole]) is not None
