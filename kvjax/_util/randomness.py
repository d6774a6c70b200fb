"""Random numbers that depend only on a seed, not on JAX's flags.

JAX's random numbers change with `jax_default_prng_impl`, `jax_threefry_partitionable`, `jax_random_seed_offset` and
`jax_enable_x64`. With `rbg` and `unsafe_rbg`, `jax.vmap` even makes a row's numbers depend on the other rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def random_key(seed: Any) -> PRNGKeyArray:
    """A threefry2x32 key from a whole number, or a scalar array of one. Only its remainder modulo 2**32 matters."""
    low = jnp.uint32(seed % 2**32) if isinstance(seed, int) else jnp.asarray(seed).astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(low), low]), impl="threefry2x32")


def uniform(key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Uniform numbers in [0, 1). The nth number depends only on n, not on the length."""
    return _partitionable(jax.random.uniform, key, shape, jnp.float32)


def normal(key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Normal numbers with mean 0 and variance 1."""
    return _partitionable(jax.random.normal, key, shape, jnp.float32)


def categorical(key: PRNGKeyArray, logits: Float[Array, " V"]) -> Int[Array, ""]:
    """Sample an index with probabilities softmax(logits)."""
    return _partitionable(jax.random.categorical, key, logits)


def _partitionable(draw: Callable[..., Any], *args: Any) -> Any:
    with jax.threefry_partitionable(True):
        return draw(*args)
