"""Random numbers that depend on seed, layer, head and position alone: the same in any batch, padded or not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax._util import randomness
from kvjax.cache import LayerSpec


def uniform(spec: LayerSpec, seed: int, pos: Int[Array, "*P"]) -> Float[Array, "K *P"]:
    """A number in [0, 1) for each KV head of this layer and each position."""
    draw = _draw(spec, seed)
    drawn = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(spec.head_ids, pos.reshape(-1))
    return drawn.reshape(-1, *pos.shape)


def uniform_by_head(spec: LayerSpec, seed: int, pos: Int[Array, "B #K T"]) -> Float[Array, "B K T"]:
    """The numbers of `uniform` at each head's own positions."""
    pos = jnp.broadcast_to(pos, (pos.shape[0], spec.num_kv_heads, pos.shape[2]))
    by_place = jax.vmap(_draw(spec, seed), (None, 0))
    return jax.vmap(jax.vmap(by_place), (None, 0))(spec.head_ids, pos)


def _draw(spec: LayerSpec, seed: int) -> Callable[[Array, Array], Array]:
    """The number of a head at a position."""
    layer = jax.random.fold_in(randomness.random_key(seed), spec.layer)
    return lambda head, at: randomness.uniform(jax.random.fold_in(jax.random.fold_in(layer, head), at))
