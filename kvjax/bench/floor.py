"""What the memory allows: the bytes that a decoding step has to read, over the device's bandwidth."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import LayerSpec
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.policies.capabilities import as_cache
from kvjax.runtime.decoding import Specs

BANDWIDTH = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100 80GB PCIe": 1.935e12,
    "A100": 1.555e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "A10G": 0.6e12,
    "T4": 0.32e12,
    "RTX 4090": 1.008e12,
    "TPU v6": 1.64e12,
    "TPU v5p": 2.765e12,
    "TPU v5e": 0.819e12,
    "TPU v5 lite": 0.819e12,
    "TPU v4": 1.228e12,
}
"""Bytes per second by what JAX calls the device (`device_kind` has it in it), from the makers' data sheets."""


def bandwidth(device_kind: str) -> float | None:
    """Bytes a second of a device's memory by its data sheet; None if it is not in the table."""
    return next((rate for name, rate in BANDWIDTH.items() if name in device_kind), None)


def weight_bytes(params: Params) -> int:
    """Bytes of weights that a decoding step reads: all of them, but of a separate embedding one row per token."""
    return sum(x.nbytes for x in jax.tree.leaves(params)) - (0 if params.head is None else params.embed.nbytes)


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
