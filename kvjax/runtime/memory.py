"""Memory of a model and its cache, and the largest cache that fits. Computed from shapes, without allocation."""

import dataclasses
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache import Shard, layer_specs
from kvjax.config import ModelConfig
from kvjax.config.model import MOST_TOKENS
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.policies.layer import held_bytes

_POWERS = {letter: i for i, letter in enumerate("KMGT", 1)}
_UNITS = {"": 1} | {k: 1000**i for k, i in _POWERS.items()} | {f"{k}I": 1024**i for k, i in _POWERS.items()}


def parse_bytes(text: str) -> int:
    """Parse a memory size such as "8GB", "8G", "512 MiB" or "1e9" to bytes.

    Raises:
        ValueError: the text is not a memory size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match[2].upper().removesuffix("B") if match else None
    if match is None or unit not in _UNITS or not math.isfinite(float(match[1])):
        raise ValueError(f"{text!r} is not a memory size; write a number and a unit, such as 8GB or 512MiB")
    return int(float(match[1]) * _UNITS[unit])


def device_bytes() -> int | None:
    """Memory of the device in bytes. None if unknown, as on CPU, or with several processes, which have to agree."""
    if jax.process_count() > 1:
        return None
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def memory_limit(shard: Shard) -> int | None:
    """Total memory in bytes of each device that the model runs on; for a CPU, that of the host. None if unknown."""
    device = jax.local_devices()[0] if shard.mesh is None else None
    if isinstance(shard.mesh, Mesh):
        device = shard.mesh.local_devices[0]
    if device is None:
        return None
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats.get("bytes_limit") if stats else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def sequence_bytes(policy: Policy, config: ModelConfig, tokens: int, dtype: Any = jnp.bfloat16) -> int:
    """Device bytes of the cache of one sequence of exactly `tokens` tokens, processed token by token."""
    bound = policy.for_model(config)
    specs = (dataclasses.replace(spec, new_tokens=tokens) for spec in layer_specs(config, 1, 0, 1, dtype, total=tokens))
    return sum(held_bytes(bound.layer(spec))[0] for spec in specs)


def largest_cache(policy: Policy, config: ModelConfig, memory: int, dtype: Any = jnp.bfloat16) -> int:
    """Maximum number of slots per head with which one sequence's cache fits into `memory` bytes; 0 if none fits.

    For a policy with a `budget` this is the largest budget, whatever the sequence length. For other policies it is the
    longest sequence, up to what int32 counts. In a model whose layers all have windows, no budget is larger than the largest
    window. The result is a multiple of 32, or of 128 above 2048, as capacities are.

    Args:
        policy: the policy. Its own budget is ignored.
        config: the model's configuration.
        memory: available memory in bytes.
        dtype: type of keys and values.
    """
    has_budget = any(field.name == "budget" for field in dataclasses.fields(policy))

    def nbytes(slots: int) -> int:
        try:
            return sequence_bytes(get_policy(policy, budget=slots) if has_budget else policy, config, slots, dtype)
        except PolicyError:  # fewer slots than the policy supports
            return 0

    # Where all layers have windows, a larger budget keeps no more, and the cache stops growing with the sequence.
    windows = [math.inf if window is None else window for window in config.windows]
    most = math.inf if math.inf in windows else max(windows) if has_budget else MOST_TOKENS
    # Start from what fits if slots hold only keys and values, times a power of two.
    high = int(min(memory // config.cache_bytes_per_token(jnp.dtype(dtype).itemsize) + 1, most))
    while (above := nbytes(high)) <= memory:
        if high == most:
            return high
        high = int(min(2 * high, most))
    step = 128 if high > 2048 else 32
    low, below, high, tries = 0, 0, -(-high // step), 0
    while high - low > 1:
        # Bytes grow almost linearly, and each evaluation traces every layer. So interpolate between both ends, and
        # bisect every third time in case growth is not linear.
        tries += 1
        guess = low + (memory - below) * (high - low) // (above - below) if tries % 3 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        found = nbytes(middle * step)
        if found <= memory:
            low, below = middle, found
        else:
            high, above = middle, found
    return low * step if below else 0
