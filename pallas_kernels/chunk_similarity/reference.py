"""Similarity inside chunks in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..nearest import Nearest
from .chunks import chunked

RESOLUTION = 2.0**-14
"""Cosines are compared in whole multiples of this.

Text repeats itself, and where the same two tokens stand equally far apart their keys are equally similar. Which of such edges is
kept must not hang on rounding errors, which differ with the size of the batch.
"""


def chunk_similarity(
    keys: Float[Array, "B K S H"], first: Int[Array, " B"], count: Int[Array, " B"], chunk: int
) -> Nearest:
    """From each even place of a chunk, the edge to the odd place with the most similar key; see the public function."""
    keys, live = chunked(keys, first, count, chunk)
    keys = keys.astype(jnp.float32)
    length = jnp.linalg.norm(keys, axis=-1, keepdims=True)
    unit = keys / jnp.maximum(length, jnp.finfo(keys.dtype).tiny)
    cosine = jnp.einsum("...ah,...bh->...ab", unit[..., 0::2, :], unit[..., 1::2, :], precision="highest")
    cosine = jnp.round(cosine / RESOLUTION) * RESOLUTION
    cosine = jnp.where(live[..., 0::2, None] & live[..., None, 1::2], cosine, -jnp.inf)
    return Nearest(jnp.max(cosine, axis=-1), jnp.argmax(cosine, axis=-1).astype(jnp.int32))
