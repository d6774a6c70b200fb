"""How much memory a model and its cache take, and how large a cache fits: arithmetic on shapes, nothing is allocated."""

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
from kvjax.policies import Policy, PolicyError, get_policy
from kvjax.policies.base import held_bytes

_POWERS = {letter: i for i, letter in enumerate("KMGT", 1)}
_UNITS = {"": 1} | {k: 1000**i for k, i in _POWERS.items()} | {f"{k}I": 1024**i for k, i in _POWERS.items()}


def parse_bytes(text: str) -> int:
    """A memory size in bytes: "8GB" or "8G", "512 MiB", "1e9".

    Raises:
        ValueError: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = match[2].upper().removesuffix("B") if match else None
    if match is None or unit not in _UNITS or not math.isfinite(float(match[1])):
        raise ValueError(f"{text!r} is not a memory size; write a number and a unit, such as 8GB or 512MiB")
    return int(float(match[1]) * _UNITS[unit])


def device_bytes() -> int | None:
    """Memory that programs may have on the device; None where it does not tell, such as on a CPU, or to processes that must agree."""
    if jax.process_count() > 1:
        return None
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def memory_limit(shard: Shard) -> int | None:
    """Memory that can be had at all on each device that a model runs on, its host's for a CPU; None where it is not known."""
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
    """Bytes on the device of the cache of one sequence that is read token by token, of just so many tokens, not rounded up."""
    first, *_ = layer_specs(config, 1, 0, 1, dtype, total=tokens)
    specs = (dataclasses.replace(first, layer=i, window=w, new_tokens=tokens) for i, w in enumerate(config.windows))
    bound = policy.bind(config)
    return sum(held_bytes(bound.layer(spec))[0] for spec in specs)


def largest_cache(policy: Policy, config: ModelConfig, memory: int, dtype: Any = jnp.bfloat16) -> int:
    """The most slots per head that the cache of one sequence can have within `memory` bytes; 0 if too few fit.

    Of a policy with a `budget` this is the largest budget, whatever the length of the sequence; of one without, the
    longest sequence. It is a multiple of 32, or of 128 above 2048, as capacities are.

    Args:
        policy: its budget, if it has one, is ignored.
        dtype: type of keys and values.
    """
    has_budget = any(field.name == "budget" for field in dataclasses.fields(policy))

    def nbytes(slots: int) -> int:
        try:
            return sequence_bytes(get_policy(policy, budget=slots) if has_budget else policy, config, slots, dtype)
        except PolicyError:  # fewer slots than the policy can work with
            return 0

    # A power of two times what fits if keys and values were all that a slot holds: near enough for a short search.
    high = memory // config.cache_bytes_per_token(jnp.dtype(dtype).itemsize) + 1
    while (above := nbytes(high)) <= memory:
        high *= 2
    step = 128 if high > 2048 else 32
    low, below, high, tries = 0, 0, -(-high // step), 0
    while high - low > 1:
        # Bytes grow almost evenly with slots, and each look at them traces every layer: so the crossing is guessed from both
        # ends, and every third time the middle is taken, for caches that grow otherwise.
        tries += 1
        guess = low + (memory - below) * (high - low) // (above - below) if tries % 3 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        found = nbytes(middle * step)
        if found <= memory:
            low, below = middle, found
        else:
            high, above = middle, found
    return low * step if below else 0
