"""The bandwidth bound: bytes that a decode step has to read, divided by the device's memory bandwidth."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.config import MoEConfig
from kvjax.devices import device_of
from kvjax.models import Params
from kvjax.models.params import Experts
from kvjax.models.sharding import bytes_per_device
from kvjax.policies import Policy
from kvjax.policies.layer import CacheLayer
from kvjax.runtime.decoding import Specs, layers_of
from kvjax.runtime.mesh import OWN, state_partitions
from kvjax.runtime.program import Partition, Program


def bandwidth(device_kind: str) -> float | None:
    """Memory bandwidth of a device in bytes per second, from its data sheet; None if it is not in the table."""
    device = device_of(device_kind)
    return None if device is None else device.bandwidth


def weight_bytes(params: Params, rows: int = 1, experts: float | None = None) -> int:
    """Bytes of weights that a decode step reads on each device.

    All weights are read, except an untied embedding and experts that no row passes through.

    Args:
        params: the weights, or their shapes.
        rows: rows of the batch.
        experts: distinct experts of a layer that the rows pass through. If None, as many as a router that chooses at random
            would hit (`MoEConfig.experts_hit`).
    """
    unread = 0.0 if params.head is None else float(bytes_per_device(params.embed))
    for kind, layer in zip(params.config.layers, params.layers, strict=True):
        if isinstance(kind.mlp, MoEConfig) and isinstance(layer.mlp, Experts):
            held = layer.mlp.gate_experts, layer.mlp.up_experts, layer.mlp.down_experts
            read = kind.mlp.experts_hit(rows) if experts is None else experts
            unread += bytes_per_device(held) * (1 - read / kind.mlp.experts)
    return bytes_per_device(params) - round(unread)


def cache_bytes_read(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> int:
    """Minimum bytes of the caches that a decode step reads. Over a mesh, those of the device that reads most.

    They are the keys and values of live slots. For sparse attention, they are the selected slots and the metadata for
    selection (see `CacheLayer.bytes_read`). For quantised slots, they are the live fraction of the layer's bytes. States of
    recurrent layers are read whole.
    """
    layers, found = layers_of(policy, specs), np.asarray(_live(policy, specs, caches))
    _live.forget()  # frees its device memory
    return max(
        sum(_layer(policy, layer, int(count)) for layer, count in zip(layers, counts, strict=True)) for counts in found
    )


def compile_counting(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> None:
    """Compile the program of `cache_bytes_read` into the compilation cache. `caches` are shapes."""
    _live.compiled(policy, specs, caches)


def _live_slots(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> Int[Array, "1 L"]:
    found: list[Any] = [_slots(policy, policy.layer(spec), x) for spec, x in zip(specs, caches, strict=True)]
    # All devices that share slots know which are live, and each holds an equal part.
    return jnp.stack([-(-jnp.sum(x.live, dtype=jnp.int32) // x.slot_shards) for x in found])[None]


def _counting(policy: Policy, specs: Specs, *_: Any) -> Partition | None:
    shard = specs[0].shard
    return None if shard.mesh is None else (shard, (state_partitions(policy, specs),), OWN)


_live = Program(_live_slots, static=2, partition=_counting)
"""`_live(policy, specs, caches)`: live slots per device and layer, [devices, layers]."""


def _slots(policy: Policy, layer: CacheLayer[Any], state: Any) -> Any:
    """Slots of a layer, with their live mask and the number of devices that share them. Quantised slots are not dequantised."""
    return state.cache if _is_quantised(policy, layer) else layer.view(state)


def _is_quantised(policy: Policy, layer: CacheLayer[Any]) -> bool:
    return policy.info.memory == "quantized" and layer.spec.recurrent is None


def _layer(policy: Policy, layer: CacheLayer[Any], live: int) -> int:
    state = jax.eval_shape(layer.init)
    if layer.spec.recurrent is not None:
        return layer.bytes_read
    if _is_quantised(policy, layer):
        held = state.cache
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) * live * held.slot_shards // held.pos.size
    pairs = live * 2 * layer.spec.head_dim * layer.spec.dtype.itemsize
    return min(pairs, layer.bytes_read)
