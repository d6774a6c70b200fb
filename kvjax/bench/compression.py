"""Times the compression of a prompt, without the model."""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax._util.randomness import random_key
from kvjax.cache import PromptKV
from kvjax.policies import Policy, prefill_alone
from kvjax.policies.layer import Carry
from kvjax.runtime.decoding import Specs

REPEATS = 4
"""Number of runs. The first is a warm-up."""


def seconds(policy: Policy, specs: Specs, context: int) -> float:
    """Median time in seconds of `Policy.prefill` over all cached layers, for random queries, keys and values.

    For a policy that does not compress, this is the time to write the cache.
    """
    specs = _cached(specs)
    inputs = jax.block_until_ready(jax.jit(partial(_random, specs, context))(random_key(3)))
    run, taken = compiled(policy, specs), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def compiled(policy: Policy, specs: Specs) -> Any:
    """The compiled program that `seconds` times."""
    specs = _cached(specs)
    inputs = jax.eval_shape(partial(_random, specs, 0), jax.eval_shape(lambda: random_key(0)))
    return jax.jit(partial(_every_layer, policy, specs)).lower(*inputs).compile()


def _cached(specs: Specs) -> Specs:
    """Those of layers with keys and values."""
    return tuple(spec for spec in specs if spec.recurrent is None)


def _random(specs: Specs, context: int, key: jax.Array) -> tuple[Array, ...]:
    spec = specs[0]
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    tensors = (
        jax.random.normal(one, (spec.batch, spec.prompt_len, count, spec.head_dim), spec.dtype)
        for one, count in zip(jax.random.split(key, 3), heads, strict=True)
    )
    return *tensors, jnp.full((spec.batch,), context, jnp.int32), jnp.ones((len(specs),), spec.dtype)


def _every_layer(
    policy: Policy,
    specs: Specs,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    factors: Float[Array, " L"],
) -> list[Any]:
    """State of each layer. Random factors make the layers' inputs differ; otherwise XLA would compute one layer for all."""
    states: list[Any] = []
    carry: Carry = {}
    for spec, factor in zip(specs, factors, strict=True):
        prompt = PromptKV.of(spec.rope, q * factor, k * factor, v * factor, lengths, lengths + spec.new_tokens)
        state, carry = prefill_alone(policy.layer(spec), prompt, carry)
        states.append(state)
    return states
