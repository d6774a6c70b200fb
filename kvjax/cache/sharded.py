"""Slots of a cache, sharded over devices that have the same KV heads: placement, and how devices combine results.

Keys and values are sharded round-robin, in runs of `RUN` slots, so devices have equally many tokens at any length. With
one contiguous shard each, all new tokens would go to the last device. Positions, weights and other per-slot arrays of a
policy are replicated. All devices therefore choose alike, and a policy that accesses keys and values only through
`kvjax.cache` needs no code for sharding.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.pallas_kernels import Stripes
from kvjax.pallas_kernels.sinks import with_sinks

from .shard import SLOTS
from .spec import round_slots
from .state import LayerCache

RUN = 32
"""Neighbouring slots on one device. Groups of this size, or of a divisor of it, are on one device."""

SMALL_GATHER = 1 << 18
"""Maximum bytes to combine with one all-gather and a local sum. Larger arrays use two all-reduces."""


class Sharded(Protocol):
    """The fields of a `LayerCache`, or of another sharded store, that determine where slots are."""

    @property
    def pos(self) -> Int[Array, "B K C"]:
        """Positions of all slots."""
        ...

    @property
    def slot_shards(self) -> int:
        """Number of devices that shard the slots."""
        ...


def local_slots(slots: int, devices: int) -> int:
    """Slots on each device of `slots` sharded ones.

    Example:
        >>> kvjax.cache.local_slots(1024, 4)
        256
    """
    return round_slots(-(-slots // (RUN * devices)) * RUN)


def sharded_empty(state: Any, devices: int) -> Any:
    """Return one device's shard of a layer's state without tokens. All shards are equal.

    Example:
        >>> part = kvjax.cache.sharded_empty(kvjax.cache.empty(spec, 64), 2)
        >>> part.k.shape, part.pos.shape, part.slot_shards
        ((1, 1, 32, 4), (1, 1, 64), 2)
    """

    def part(x: Array, axis: int, run: int) -> Array:
        return jax.lax.slice_in_dim(x, 0, local_slots(x.shape[axis] * RUN // run, devices) * run // RUN, axis=axis)

    return _with_kv(state, devices, part)


def shard_slots(state: Any, devices: int) -> Any:
    """Return one device's shard of a layer's state, unless the state is already sharded.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 64, prompt)
        >>> def shard(device):
        ...     return kvjax.cache.shard_slots(cache, 2)
        >>> parts = jax.vmap(shard, axis_name="slots")(jnp.arange(2))  # `vmap` in place of two devices
        >>> parts.k.shape, parts.pos.shape  # keys and values are sharded, positions are on both devices
        ((2, 1, 1, 32, 4), (2, 1, 1, 64))
    """
    if state.cache.slot_shards == devices:
        return state
    return _with_kv(state, devices, lambda x, axis, run: local_part(x, devices, axis=axis, run=run))


def gathered(state: Any) -> Any:
    """Return a layer's sharded state, whole on every device.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 64, prompt)
        >>> def there_and_back(device):
        ...     return kvjax.cache.gathered(kvjax.cache.shard_slots(cache, 2)).k
        >>> whole = jax.vmap(there_and_back, axis_name="slots")(jnp.arange(2))  # `vmap` in place of two devices
        >>> bool((whole == cache.k).all())
        True
    """
    devices, size = state.cache.slot_shards, state.cache.pos.shape[-1]

    def whole(x: Array, axis: int, run: int) -> Array:
        parts = jax.lax.all_gather(x, SLOTS, axis=axis, tiled=True)
        return global_order(parts, devices, size * run // RUN, axis=axis, run=run)

    return _with_kv(state, 1, whole)


def local_part(
    x: Shaped[Array, "B K *S"], devices: int, fill: Any = 0, *, axis: int = 2, run: int = RUN
) -> Shaped[Array, "B K ..."]:
    """Return this device's shard of a per-slot array, padded with `fill` to equal sizes.

    Args:
        x: values of all slots.
        devices: number of shards.
        fill: padding.
        axis: axis of slots, or of groups of slots.
        run: entries of this array per run of slots.

    Example:
        >>> x = jnp.arange(8).reshape(1, 1, 8)
        >>> def part(device):
        ...     return kvjax.cache.local_part(x, 2, run=2)[0, 0]
        >>> jax.vmap(part, axis_name="slots")(jnp.arange(2)).tolist()  # `vmap` in place of two devices
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    runs = jnp.moveaxis(_runs(x, devices, fill, axis, run), 3, 0)
    return _flat(jax.lax.dynamic_index_in_dim(runs, _index(), keepdims=False), axis)


def shard_order(x: Any, devices: int, *, axis: int = 2, run: int = RUN) -> Any:
    """Reorder slots by device, one shard after the other. NumPy or JAX arrays.

    Args:
        x: values of all slots.
        devices: number of shards.
        axis, run: as for `local_part`.

    Example:
        >>> x = np.arange(8).reshape(1, 1, 8)
        >>> kvjax.cache.shard_order(x, 2, run=2)[0, 0].tolist()  # four slots of each device
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return _flat(_flat(_runs(x, devices, 0, axis, run).swapaxes(2, 3), 2), axis)


def global_order(x: Any, devices: int, size: int, *, axis: int = 2, run: int = RUN) -> Any:
    """Inverse of `shard_order`: return the first `size` slots in their original order.

    Args:
        x: values of all slots, by device.
        devices: number of shards.
        size: number of slots.
        axis, run: as for `local_part`.

    Example:
        >>> x = np.asarray([[[0, 1, 4, 5, 2, 3, 6, 7]]])
        >>> kvjax.cache.global_order(x, 2, 8, run=2)[0, 0].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x = _moved(x, axis, 2)
    runs = x.reshape(*x.shape[:2], devices, -1, run, *x.shape[3:]).swapaxes(2, 3)
    return _moved(_flat(_flat(runs, 2), 2)[:, :, :size], 2, axis)


def slots_of_leaves(state: Any) -> list[int]:
    """For each array of sharded states, slots per device of the cache that it belongs to.

    0 for arrays that belong to no sharded cache.

    Example:
        >>> cache = kvjax.cache.sharded_empty(kvjax.cache.empty(spec, 64), 2)
        >>> kvjax.cache.slots_of_leaves({"cache": cache, "other": jnp.zeros(3)})
        [32, 32, 32, 32, 32, 32, 0]
    """
    found: list[int] = []
    for each in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "slot_shards")):
        devices = getattr(each, "slot_shards", 1)
        slots = local_slots(each.pos.shape[-1], devices) if devices > 1 else 0
        found += [slots] * len(jax.tree.leaves(each))
    return found


def local_slot(cache: Sharded, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """Index of slots in this device's shard, out of bounds for slots of other devices.

    Example:
        >>> cache = kvjax.cache.empty(spec, 128).replace(slot_shards=2)
        >>> def place(device):
        ...     return kvjax.cache.local_slot(cache, jnp.asarray([31, 32, 64]))
        >>> jax.vmap(place, axis_name="slots")(jnp.arange(2)).tolist()  # 64 slots on each device; 64 is none of them
        [[31, 64, 32], [64, 0, 64]]
    """
    local = local_slots(cache.pos.shape[-1], cache.slot_shards)
    return jnp.where(slot < cache.pos.shape[-1], _local_slot(slot, cache.slot_shards, local), local)


def local_pages(
    cache: LayerCache, index: Int[Array, "B R P"], live: Bool[Array, "B R L"], page: int
) -> tuple[Int[Array, "B R Q"], Bool[Array, "B R S"], int]:
    """Return the part of selected pages that is in this device's shard, for `gather_attention`.

    Returns:
        Pages, which of their slots are valid, and slots per page.
    """
    size = math.gcd(page, RUN)  # pages that span several devices are read in parts
    first = index[..., None] * page + jnp.arange(0, page, size, dtype=jnp.int32)
    first = first.reshape(*index.shape[:2], -1)
    slots = (first[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(*index.shape[:2], -1)
    meant = live if live.shape[-1] == slots.shape[-1] else jnp.repeat(live, page, axis=-1)
    meant &= slots < cache.seen[:, None, None]
    at = local_slot(cache, first)
    here = at < cache.k.shape[2]
    return jnp.where(here, at, 0) // size, meant & jnp.repeat(here, size, axis=-1), size


def stripes(devices: int) -> Stripes:
    """Slots of a cache in this device's shard, in the form that kernels take.

    Example:
        >>> def stripes(device):
        ...     return kvjax.cache.stripes(2).part
        >>> jax.vmap(stripes, axis_name="slots")(jnp.arange(2)).tolist()  # device p has the runs p, p + 2, p + 4, …
        [0, 1]
    """
    return Stripes(RUN, devices, _index())


def keys_at(cache: LayerCache, pos: Int[Array, "B W"]) -> Float[Array, "B K W H"]:
    """Keys in the same slots of all heads, arbitrary for slots that do not exist.

    Example:
        >>> cache = kvjax.cache.from_prompt(spec, 8, prompt)
        >>> bool((kvjax.cache.keys_at(cache, jnp.asarray([[4, 5]]))[0, 0] == cache.k[0, 0, 4:6]).all())
        True
    """
    slot = jnp.minimum(pos, cache.pos.shape[-1] - 1)[:, None]
    return rows_at(cache.k, slot, cache.slot_shards)


def rows_at(x: Shaped[Array, "B K L H"], slot: Int[Array, "B #K S"], devices: int) -> Shaped[Array, "B K S H"]:
    """Gather slots of a sharded array, with the same result on all devices. All slots must exist.

    Example:
        >>> x = jnp.arange(8.0).reshape(1, 1, 8, 1)
        >>> kvjax.cache.rows_at(x, jnp.asarray([[[5, 2]]]), devices=1).ravel().tolist()
        [5.0, 2.0]
    """
    if devices == 1:
        return jnp.take_along_axis(x, slot[..., None], axis=2, mode="clip")
    at = _local_slot(slot, devices, x.shape[2])
    mine = at < x.shape[2]
    rows = jnp.take_along_axis(x, jnp.where(mine, at, 0)[..., None], axis=2)
    return jax.lax.psum(jnp.where(mine[..., None], rows, jnp.zeros((), rows.dtype)), SLOTS)


def merged(
    out: Float[Array, "*S N H"], logsumexp: Float[Array, "*S N"], devices: int, sinks: Float[Array, " N"] | None = None
) -> Float[Array, "*S N H"]:
    """Attention over all slots, and attention sinks if there are any, from each device's attention over its shard (see
    `Attended`).

    Devices without a live slot have no weight. All devices compute the same numbers in the same order, and get the same
    bits.

    Example:
        >>> outs, logsumexps = jnp.asarray([[[1.0]], [[3.0]]]), jnp.log(jnp.asarray([[1.0], [3.0]]))
        >>> def merge(out, logsumexp):
        ...     return kvjax.cache.merged(out, logsumexp, 2)
        >>> jax.vmap(merge, axis_name="slots")(outs, logsumexps).ravel().round(2).tolist()  # (1 · 1 + 3 · 3) / 4 on both devices
        [2.5, 2.5]
    """
    parts = jnp.concatenate([out.astype(jnp.float32), logsumexp[..., None]], axis=-1)
    small = 4 * parts.size * devices <= SMALL_GATHER
    if small:
        parts = jax.lax.all_gather(parts, SLOTS)
        top = jnp.max(parts[..., -1], axis=0)
    else:
        top = jax.lax.pmax(logsumexp, SLOTS)
    share = jnp.exp(parts[..., -1:] - jnp.where(jnp.isfinite(top), top, 0.0)[..., None])
    weighted = jnp.concatenate([share * parts[..., :-1], share], axis=-1)
    total = jnp.sum(weighted, axis=0) if small else jax.lax.psum(weighted, SLOTS)
    whole = total[..., :-1] / jnp.maximum(total[..., -1:], jnp.finfo(jnp.float32).tiny)
    if sinks is not None:
        whole = with_sinks(whole, top + jnp.log(total[..., -1]), sinks)
    return whole.astype(out.dtype)


def _runs(x: Any, devices: int, fill: Any, axis: int, run: int) -> Any:
    """Reshape slots to [B, K, L / run, devices, run, ...], padded to L per device."""
    x = _moved(x, axis, 2)
    local, numbers = local_slots(x.shape[2] * RUN // run, devices) * run // RUN, _numbers(x)
    padding = [(0, 0), (0, 0), (0, local * devices - x.shape[2]), *[(0, 0)] * (x.ndim - 3)]
    padded = numbers.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:2], local // run, devices, run, *x.shape[3:])


def _flat(runs: Any, axis: int) -> Any:
    """Merge axes 2 and 3, and move the result to `axis`."""
    return _moved(runs.reshape(*runs.shape[:2], -1, *runs.shape[4:]), 2, axis)


def _moved(x: Any, source: int, to: int) -> Any:
    return x if source == to else _numbers(x).moveaxis(x, source, to)


def _numbers(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _local_slot(slot: Int[Array, "*S"], devices: int, local: int) -> Int[Array, "*S"]:
    """Index of slots among the `local` ones of this device, `local` for slots of other devices."""
    run, place = slot // RUN, slot % RUN
    return jnp.where(run % devices == _index(), run // devices * RUN + place, local)


def _index() -> Int[Array, ""]:
    """Index of this device."""
    return jax.lax.axis_index(SLOTS).astype(jnp.int32)


def _with_kv(state: Any, devices: int, change: Any) -> Any:
    """Return the state with `change(x, axis, run)` of each array of its keys and values, see `local_part`."""
    held = state.cache
    slots = local_slots(held.pos.shape[-1], held.slot_shards) if held.slot_shards > 1 else held.pos.shape[-1]

    def changed(x: Array, axis: int) -> Array:
        return change(x, axis, RUN * x.shape[axis] // slots)

    k, v = jax.tree.map(changed, (held.k, held.v), held.slot_axes)
    kept = dataclasses.replace(held, k=k, v=v, slot_shards=devices)
    return kept if state.cache is state else dataclasses.replace(state, cache=kept)
