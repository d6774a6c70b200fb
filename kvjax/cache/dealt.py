"""Slots of a cache dealt among devices that have the same KV heads: which device has which, and how what each finds comes together.

Keys and values are dealt, in turn by runs of `RUN` slots, so that devices have as many tokens as one another however many there are; in one
part each, all new tokens would go to the last device. Positions, weights, and whatever else a policy knows of slots, are on every
device: so all choose alike, and a policy that leaves keys and values to the functions of `kvjax.cache` need not know.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.pallas_kernels import Stripes

from .shard import SLOTS
from .spec import round_slots
from .state import LayerCache

RUN = 16
"""Neighbouring slots on one device."""

SMALL_GATHER = 1 << 18
"""Bytes up to which each device is sent what all have and adds it up itself: one communication. Of more, sums are sent, by two."""


class Dealt(Protocol):
    """What of a `LayerCache` tells where slots are; of other stores, too, that are dealt."""

    @property
    def k(self) -> Float[Array, "B K _ H"]:
        """Keys of this device's slots."""
        ...

    @property
    def pos(self) -> Int[Array, "B K C"]:
        """Positions of all slots."""
        ...

    @property
    def dealt(self) -> int:
        """Among how many devices."""
        ...


def local_slots(slots: int, devices: int) -> int:
    """Slots that each device holds of so many."""
    return round_slots(-(-slots // (RUN * devices)) * RUN)


def dealt_empty(state: Any, devices: int) -> Any:
    """A layer's state without tokens, of whose slots each device holds its part: they are all alike."""
    return _with_kv(state, devices, lambda x: x[:, :, : local_slots(x.shape[2], devices)])


def deal(state: Any, devices: int) -> Any:
    """A layer's state, a `LayerCache` or one that has it as `cache`, of which each device holds its part; as it is, if that is so."""
    return state if state.cache.dealt == devices else _with_kv(state, devices, lambda x: own(x, devices))


def gathered(state: Any) -> Any:
    """A layer's state that is dealt, whole on every device."""
    devices, size = state.cache.dealt, state.cache.pos.shape[-1]

    def whole(x: Shaped[Array, "B K L H"]) -> Shaped[Array, "B K C H"]:
        return in_order(jax.lax.all_gather(x, SLOTS, axis=2, tiled=True), devices, size)

    return _with_kv(state, 1, whole)


def own(x: Shaped[Array, "B K C *S"], devices: int, fill: Any = 0) -> Shaped[Array, "B K L *S"]:
    """Of what is known of all slots, this device's part; `fill` where there are fewer than would be even."""
    runs = jnp.moveaxis(_runs(x, devices, fill), 3, 0)
    return jax.lax.dynamic_index_in_dim(runs, _index(), keepdims=False).reshape(*x.shape[:2], -1, *x.shape[3:])


def by_device(x: Any, devices: int) -> Any:
    """Slots [B, K, C, ...] in the order in which devices have them, one device's after the other's; of NumPy or JAX."""
    return _runs(x, devices, 0).swapaxes(2, 3).reshape(*x.shape[:2], -1, *x.shape[3:])


def in_order(x: Any, devices: int, size: int) -> Any:
    """The first `size` slots, of those in the order of `by_device`."""
    runs = x.reshape(*x.shape[:2], devices, -1, RUN, *x.shape[3:]).swapaxes(2, 3)
    return runs.reshape(*x.shape[:2], -1, *x.shape[3:])[:, :, :size]


def own_slot(cache: Dealt, slot: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """Where slots are in this device's part; beyond its end those that are not."""
    local = cache.k.shape[2]
    return jnp.where(slot < cache.pos.shape[-1], _own_slot(slot, cache.dealt, local), local)


def own_pages(
    cache: LayerCache, index: Int[Array, "B R P"], live: Bool[Array, "B R L"], page: int
) -> tuple[Int[Array, "B R Q"], Bool[Array, "B R S"], int]:
    """Pages of slots, as `gather_attention` takes them, in this device's part: pages, which of their slots are meant, and slots of a page."""
    size = math.gcd(page, RUN)  # pages that lie on several devices are read in parts
    first = index[..., None] * page + jnp.arange(0, page, size, dtype=jnp.int32)
    first = first.reshape(*index.shape[:2], -1)
    slots = (first[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(*index.shape[:2], -1)
    meant = live if live.shape[-1] == slots.shape[-1] else jnp.repeat(live, page, axis=-1)
    meant &= slots < cache.seen[:, None, None]
    at = own_slot(cache, first)
    here = at < cache.k.shape[2]
    return jnp.where(here, at, 0) // size, meant & jnp.repeat(here, size, axis=-1), size


def stripes(devices: int) -> Stripes:
    """Which of a cache's slots this device has, as kernels are told."""
    return Stripes(RUN, devices, _index())


def keys_at(cache: LayerCache, pos: Int[Array, "B W"]) -> Float[Array, "B K W H"]:
    """Keys in the same slots of all heads; in those that do not exist, whatever there is."""
    slot = jnp.minimum(pos, cache.pos.shape[-1] - 1)[:, None]
    return rows_at(cache.k, slot, cache.dealt)


def rows_at(x: Shaped[Array, "B K L H"], slot: Int[Array, "B #K S"], devices: int) -> Shaped[Array, "B K S H"]:
    """What is in slots, each of which exists, of an array that is dealt; the same on all devices."""
    if devices == 1:
        return jnp.take_along_axis(x, slot[..., None], axis=2, mode="clip")
    at = _own_slot(slot, devices, x.shape[2])
    mine = at < x.shape[2]
    rows = jnp.take_along_axis(x, jnp.where(mine, at, 0)[..., None], axis=2)
    return jax.lax.psum(jnp.where(mine[..., None], rows, jnp.zeros((), rows.dtype)), SLOTS)


def merged(out: Float[Array, "*S H"], logsumexp: Float[Array, "*S"], devices: int) -> Float[Array, "*S H"]:
    """Attention over all slots, of what each device has found over its own; see `Attended`.

    Devices without a live slot count nothing. All compute the same numbers in the same order, so they have the same bits.
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
    return (total[..., :-1] / jnp.maximum(total[..., -1:], jnp.finfo(jnp.float32).tiny)).astype(out.dtype)


def _runs(x: Any, devices: int, fill: Any) -> Any:
    """Slots as [B, K, L / RUN, devices, RUN, ...], filled up to L for each device."""
    local, numbers = local_slots(x.shape[2], devices), np if isinstance(x, np.ndarray) else jnp
    padding = [(0, 0), (0, 0), (0, local * devices - x.shape[2]), *[(0, 0)] * (x.ndim - 3)]
    padded = numbers.pad(x, padding, constant_values=fill)
    return padded.reshape(*x.shape[:2], local // RUN, devices, RUN, *x.shape[3:])


def _own_slot(slot: Int[Array, "*S"], devices: int, local: int) -> Int[Array, "*S"]:
    """Where slots are among the `local` ones of this device; `local` for those that are not."""
    run, place = slot // RUN, slot % RUN
    return jnp.where(run % devices == _index(), run // devices * RUN + place, local)


def _index() -> Int[Array, ""]:
    """Which of the devices this one is."""
    return jax.lax.axis_index(SLOTS).astype(jnp.int32)


def _with_kv(state: Any, devices: int, change: Any) -> Any:
    kept = dataclasses.replace(state.cache, k=change(state.cache.k), v=change(state.cache.v), dealt=devices)
    return kept if state.cache is state else dataclasses.replace(state, cache=kept)
