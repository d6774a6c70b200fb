"""Random numbers that depend on seed, layer, head and position alone: the same in any batch, padded or not."""

import jax
from jaxtyping import Array, Float, Int

from kvjax import randomness
from kvjax.cache import LayerSpec


def uniform(spec: LayerSpec, seed: int, pos: Int[Array, "*P"]) -> Float[Array, "K *P"]:
    """A number in [0, 1) for each KV head of this layer and each position."""
    layer = jax.random.fold_in(randomness.random_key(seed), spec.layer)

    def draw(head: Int[Array, ""], at: Int[Array, ""]) -> Float[Array, ""]:
        return randomness.uniform(jax.random.fold_in(jax.random.fold_in(layer, head), at))

    drawn = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(spec.head_ids, pos.reshape(-1))
    return drawn.reshape(-1, *pos.shape)
