"""Random numbers that follow from a seed alone, whatever JAX's flags are.

JAX draws other numbers where `jax_default_prng_impl`, `jax_threefry_partitionable` or `jax_enable_x64` are not at their defaults. With `rbg` and
`unsafe_rbg`, what `jax.vmap` draws for a row even depends on the other rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def random_key(seed: Any) -> PRNGKeyArray:
    """A threefry2x32 key, from a whole number or a scalar array of one."""
    return jax.random.key(seed, impl="threefry2x32")


def uniform(key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Numbers in [0, 1). The nth of a list depends on n alone, however long the list is."""
    return _partitionable(jax.random.uniform, key, shape, jnp.float32)


def normal(key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Normal numbers of variance 1."""
    return _partitionable(jax.random.normal, key, shape, jnp.float32)


def categorical(key: PRNGKeyArray, logits: Float[Array, " V"]) -> Int[Array, ""]:
    """An index with the probabilities softmax(logits)."""
    return _partitionable(jax.random.categorical, key, logits)


def _partitionable(draw: Callable[..., Any], *args: Any) -> Any:
    with jax.threefry_partitionable(True):
        return draw(*args)
