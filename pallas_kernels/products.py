"""The matmul that the attention kernels use."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def dot(a: Array, b: Array, contract: int) -> Array:
    """Contract the last dimension of `a` with dimension `contract` of `b`, accumulating in float32.

    float32 operands are multiplied at full float32 precision.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((a.ndim - 1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
