"""JAX's arrays of what NumPy has."""

from typing import Any

import jax
import numpy as np


def to_jax(x: Any, dtype: Any = None) -> jax.Array:
    """As `jnp.asarray`, which compiles a program for every shape and type."""
    return jax.device_put(np.asarray(x, dtype))
