"""What the memory allows: the bytes that a decoding step has to read, over the device's bandwidth."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.devices import device_of
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device
from kvjax.policies import Policy
from kvjax.policies.base import CacheLayer
from kvjax.runtime.decoding import Specs, layers_of
from kvjax.runtime.mesh import OWN, state_partitions
from kvjax.runtime.program import Partition, Program


def bandwidth(device_kind: str) -> float | None:
    """Bytes a second of a device's memory by its data sheet; None if it is not in the table."""
    device = device_of(device_kind)
    return None if device is None else device.bandwidth


def weight_bytes(params: Params) -> int:
    """Bytes of weights that a decoding step reads on each device: all of them, but of a separate embedding one row per token."""
    return bytes_per_device(params) - (0 if params.head is None else bytes_per_device(params.embed))


def cache_bytes_read(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> int:
    """Bytes of the caches that a decoding step has to read, at least; over a mesh, on the device that reads most.

    These are the keys and values of live slots; of sparse attention, what is selected and the metadata by which it is
    (see `CacheLayer.bytes_read`); of quantised slots, their share of what the layer holds.
    """
    layers, found = layers_of(policy, specs), np.asarray(_live(policy, specs, caches))
    _live.forget()  # it holds device memory
    return max(
        sum(_layer(policy, layer, int(count)) for layer, count in zip(layers, counts, strict=True)) for counts in found
    )


def compile_counting(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> None:
    """Have the program of `cache_bytes_read` in the compilation cache; `caches` are shapes."""
    _live.compiled(policy, specs, caches)


def _live_slots(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> Int[Array, "1 L"]:
    found: list[Any] = [_slots(policy, policy.layer(spec), x) for spec, x in zip(specs, caches, strict=True)]
    # Which slots are live is known on all devices that share them, of which each has an equal part.
    return jnp.stack([-(-jnp.sum(x.live, dtype=jnp.int32) // x.dealt) for x in found])[None]


def _counting(policy: Policy, specs: Specs, *_: Any) -> Partition | None:
    shard = specs[0].shard
    return None if shard.mesh is None else (shard, (state_partitions(policy, specs),), OWN)


_live = Program(_live_slots, static=2, partition=_counting)
"""`_live(policy, specs, caches)`: live slots [devices, layers] of each device."""


def _slots(policy: Policy, layer: CacheLayer[Any], state: Any) -> Any:
    """A layer's slots: which are live, and among how many devices they are dealt; quantised ones as they are."""
    return state.cache if policy.info.memory == "quantized" else layer.view(state)


def _layer(policy: Policy, layer: CacheLayer[Any], live: int) -> int:
    state = jax.eval_shape(layer.init)
    if policy.info.memory == "quantized":
        held = state.cache
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) * live * held.dealt // held.pos.size
    pairs = live * 2 * layer.spec.head_dim * layer.spec.dtype.itemsize
    return min(pairs, layer.bytes_read)
