"""Arrays in host memory within compiled programs: moves, and reads and writes in place.

JAX stores the memory space in an array's type (`float32<host>[...]`), and computes only with arrays of one space.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import compute_on as _compute_on
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import fetch_slots, heads_of, reads_host_memory, write_slots, writes_host_memory
from kvjax.pallas_kernels.device import target

from .state import compact_indices
from .tokens import Rotated

Tree = TypeVar("Tree")

Stores = tuple[Array, ...]
"""Keys and values, or all arrays of a policy's store."""

BLOCK = 128
"""Slots of a head that are fetched at a time."""

# The function with this signature is `compute_on2` up to jax 0.10, and `compute_on` since 0.11.
_computed_on: Any = getattr(_compute_on, "compute_on2", _compute_on.compute_on)

_TOKENS = jax.lax.GatherDimensionNumbers(
    offset_dims=(3,), collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2)
)  # one [H] per (row, head, slot)


def available() -> bool:
    """Whether the default device can use host memory (JAX's memory kind `pinned_host`)."""
    return any(memory.kind == "pinned_host" for memory in jax.devices()[0].addressable_memories())


def on_host(x: Any) -> bool:
    """Whether an array or a tracer is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_host(tree: Tree) -> Tree:
    """Move arrays to host memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Tree) -> Tree:
    """Move arrays to device memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def write(store: Float[Array, "B K C H"], slot: Int[Array, "B K"], x: Rotated) -> Array:
    """Write `x` [B, K, H] into one slot per head of a host store, in place. Only `x` moves."""
    if writes_host_memory(store):
        # One kernel per array: XLA (of JAX 0.11) fails to compile a kernel with several results if one is in host memory.
        # The result's type does not say that it is in host memory, because it reuses the store's buffer.
        return jax.lax.optimization_barrier(to_host(write_slots([store], slot, [x])[0]))
    x = heads_of(x).astype(store.dtype)
    # One slice at a time: the device writes slices to host memory directly. The host would have to run a scatter, on a copy.
    for row, head in np.ndindex(slot.shape):
        one = to_host(x[row : row + 1, head : head + 1, None])
        start = (np.int32(row), np.int32(head), slot[row, head], np.int32(0))
        store = jax.lax.dynamic_update_slice(store, one, start)
    return store


def read(stores: Any, slot: Int[Array, "B N F"]) -> Any:
    """Gather slots of several stores [B, K, C, H] to the device, as [B, N, F, H]. From a host store, only these move.

    Args:
        stores: a pytree of stores, all in one memory.
        slot: slots for each of N heads. N / K consecutive heads read one KV head. All slots must exist.
    """
    leaves = jax.tree.leaves(stores)
    rows, heads, _ = np.ogrid[: slot.shape[0], : slot.shape[1], :1]
    heads = heads // (slot.shape[1] // leaves[0].shape[1])
    index = jnp.stack(jnp.broadcast_arrays(jnp.asarray(rows, jnp.int32), jnp.asarray(heads, jnp.int32), slot), axis=-1)

    def gather(stores: Any, index: Array) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.gather(x, index, _TOKENS, (1, 1, 1, x.shape[-1]), mode="promise_in_bounds"), stores
        )

    if not on_host(leaves[0]):
        return gather(stores, index)
    host = _computed_on(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return host(stores, to_host(index))


def read_missing(stores: Stores, slot: Int[Array, "B N F"], missing: Bool[Array, "B N F"], got: Stores) -> Stores:
    """Return `got` with its missing slots read from host stores: by the device if it can, otherwise block by block.

    Args:
        stores, slot: as for `read`.
        missing: which slots to read.
        got: [B, N, F, H] of each store, with the other slots, which the device has.
    """
    if reads_host_memory(stores, slot, missing, got):
        return tuple(fetch_slots(stores, slot, missing, got))
    size = slot.shape[-1]
    block = min(BLOCK, size)
    places, exists = compact_indices(missing, -(-size // block) * block)
    places = jnp.where(exists, places, size)  # out of bounds: dropped
    most = jnp.max(jnp.sum(missing, axis=-1, dtype=jnp.int32))
    rows, heads, _ = np.ogrid[: slot.shape[0], : slot.shape[1], :1]

    def unfinished(loop: tuple[Array, Stores]) -> Array:
        return loop[0] < most

    def step(loop: tuple[Array, Stores]) -> tuple[Array, Stores]:
        start, got = loop
        place = jax.lax.dynamic_slice_in_dim(places, start, block, axis=2)
        new = read(stores, jnp.take_along_axis(slot, place, axis=2, mode="clip"))
        return start + block, jax.tree.map(lambda x, y: x.at[rows, heads, place].set(y, mode="drop"), got, new)

    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), got))[1]


def find(slot: Int[Array, "B R F"], index: Int[Array, "B R S"]) -> tuple[Int[Array, "B R S"], Bool[Array, "B R S"]]:
    """Find each of `index` in `slot`, the slots that the device has. Return the place, and whether it was found."""
    if slot.shape[-1] == 0:
        return jnp.zeros_like(index), jnp.zeros(index.shape, bool)
    if target().platform == "gpu":  # one kernel, where sorting and searching need about thirty
        places = jnp.arange(slot.shape[-1], dtype=jnp.int32)
        place = jnp.max(jnp.where(slot[:, :, None] == index[..., None], places, -1), axis=-1)
        return jnp.maximum(place, 0), place >= 0
    order = jnp.argsort(slot, axis=-1)
    ranked = jnp.take_along_axis(slot, order, axis=-1)
    rank = jax.vmap(jax.vmap(jnp.searchsorted))(ranked, index)
    rank = jnp.minimum(rank, slot.shape[-1] - 1)
    found = jnp.take_along_axis(ranked, rank, axis=-1) == index
    return jnp.take_along_axis(order, rank, axis=-1), found
