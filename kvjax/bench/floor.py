"""What the memory allows: the bytes that a decoding step has to read, over the device's bandwidth."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import LayerSpec
from kvjax.devices import device_of
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device
from kvjax.policies import Policy
from kvjax.policies.capabilities import as_cache
from kvjax.runtime.decoding import Specs


def bandwidth(device_kind: str) -> float | None:
    """Bytes a second of a device's memory by its data sheet; None if it is not in the table."""
    device = device_of(device_kind)
    return None if device is None else device.bandwidth


def weight_bytes(params: Params) -> int:
    """Bytes of weights that a decoding step reads on each device: all of them, but of a separate embedding one row per token."""
    return bytes_per_device(params) - (0 if params.head is None else bytes_per_device(params.embed))


def cache_bytes_read(policy: Policy, specs: Specs, caches: tuple[object, ...]) -> int:
    """Bytes of the caches that a decoding step has to read, at least.

    These are the keys and values of live slots; of sparse attention, what is selected and the metadata by which it is
    (see `Layer.bytes_read`); of quantised slots, their share of what the layer holds.
    """

    @jax.jit
    def live(caches: tuple[object, ...]) -> list[jax.Array]:
        return [
            jnp.sum(as_cache(policy.layer(spec), x).live, dtype=jnp.int32)
            for spec, x in zip(specs, caches, strict=True)
        ]

    return sum(
        _layer(policy, spec, int(count), cache) for spec, count, cache in zip(specs, live(caches), caches, strict=True)
    )


def _layer(policy: Policy, spec: LayerSpec, live: int, cache: object) -> int:
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(cache))
    if policy.info.memory == "quantized":
        shape = jax.eval_shape(lambda x: as_cache(policy.layer(spec), x).pos, cache).shape
        return cache_bytes * live // int(np.prod(shape))
    pairs = live * 2 * spec.head_dim * spec.dtype.itemsize
    return min(pairs, policy.layer(spec).bytes_read)
