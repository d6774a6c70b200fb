"""Search for the nearest key in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..ties import exceeds
from .types import Nearest


def nearest(
    queries: Float[Array, "*B N H"], keys: Float[Array, "*B M H"], bias: Float[Array, "*B M"] | None = None
) -> Nearest:
    """The key with the largest inner product plus bias; see the public function."""
    scores = jnp.einsum("...nh,...mh->...nm", queries, keys, precision="highest", preferred_element_type=jnp.float32)
    if bias is not None:
        scores = jnp.where(bias[..., None, :] > -jnp.inf, scores + bias[..., None, :], -jnp.inf)
    highest = jnp.max(scores, axis=-1)
    return Nearest(highest, jnp.argmax(~exceeds(highest[..., None], scores), axis=-1).astype(jnp.int32))
