"""The matrix product that the kernels of attention operations are made of."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def dot(a: Array, b: Array, contract: int) -> Array:
    """Products summed in float32 over the last dimension of `a` and dimension `contract` of `b`; float32 ones exactly."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((a.ndim - 1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
