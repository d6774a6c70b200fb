"""Arrays in the host's memory, within compiled programs: moved there and back, written to and read from in place.

JAX has the memory space in an array's type (`float32<host>[...]`), and computes only with arrays of one space.
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
"""Keys and values, or whatever a policy has in its store."""

BLOCK = 128
"""Slots of a head that are fetched at a time."""

# Of this signature it is `compute_on2` up to jax 0.10, and `compute_on` since 0.11.
_computed_on: Any = getattr(_compute_on, "compute_on2", _compute_on.compute_on)

_TOKENS = jax.lax.GatherDimensionNumbers(
    offset_dims=(3,), collapsed_slice_dims=(0, 1, 2), start_index_map=(0, 1, 2)
)  # one [H] a (row, head, slot)


def available() -> bool:
    """Whether the default device can use host memory (JAX's memory kind `pinned_host`)."""
    return any(memory.kind == "pinned_host" for memory in jax.devices()[0].addressable_memories())


def on_host(x: Any) -> bool:
    """Whether an array, or what stands for it in a traced program, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_host(tree: Tree) -> Tree:
    """The same arrays in host memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Tree) -> Tree:
    """The same arrays in the device's memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def write(store: Float[Array, "B K C H"], slot: Int[Array, "B K"], x: Rotated) -> Array:
    """A host's store with `x` [B, K, H] in one slot per head, written in place: only `x` travels."""
    if writes_host_memory(store):
        # An array a kernel: XLA's compiler (of JAX 0.11) fails where one with several results has one in the host's memory. The type of a
        # result does not tell that it is there, as its buffer is the store's own.
        return jax.lax.optimization_barrier(to_host(write_slots([store], slot, [x])[0]))
    x = heads_of(x).astype(store.dtype)
    # One after the other: a device writes slices to the host's memory itself, a scatter the host would have to do, in a copy.
    for row, head in np.ndindex(slot.shape):
        one = to_host(x[row : row + 1, head : head + 1, None])
        start = (np.int32(row), np.int32(head), slot[row, head], np.int32(0))
        store = jax.lax.dynamic_update_slice(store, one, start)
    return store


def read(stores: Any, slot: Int[Array, "B N F"]) -> Any:
    """Some slots of each of several stores [B, K, C, H], as [B, N, F, H] on the device. Of a host's store, only they travel.

    Args:
        stores: a pytree of stores, all in one memory.
        slot: which, for each of N heads, of which N / K in turn read from one KV head. All exist.
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
    """`got` with what is missing from it read from host stores: by the device itself where it can, else block by block.

    Args:
        stores, slot: as for `read`.
        missing: which slots to read.
        got: [B, N, F, H] of each store, what the device has of the others.
    """
    if reads_host_memory(stores, slot, missing, got):
        return tuple(fetch_slots(stores, slot, missing, got))
    size = slot.shape[-1]
    block = min(BLOCK, size)
    places, exists = compact_indices(missing, -(-size // block) * block)
    places = jnp.where(exists, places, size)  # out of range, hence dropped
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
    """Where in `slot`, which the device has, each of `index` is, and whether it is there."""
    if slot.shape[-1] == 0:
        return jnp.zeros_like(index), jnp.zeros(index.shape, bool)
    if target().platform == "gpu":  # in one kernel, where sorting and searching are some thirty in a row
        places = jnp.arange(slot.shape[-1], dtype=jnp.int32)
        place = jnp.max(jnp.where(slot[:, :, None] == index[..., None], places, -1), axis=-1)
        return jnp.maximum(place, 0), place >= 0
    order = jnp.argsort(slot, axis=-1)
    ranked = jnp.take_along_axis(slot, order, axis=-1)
    rank = jax.vmap(jax.vmap(jnp.searchsorted))(ranked, index)
    rank = jnp.minimum(rank, slot.shape[-1] - 1)
    found = jnp.take_along_axis(ranked, rank, axis=-1) == index
    return jnp.take_along_axis(order, rank, axis=-1), found
