"""Random numbers from seed, layer, head and position only. They do not depend on the batch or on padding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax._util import randomness
from kvjax.cache import LayerSpec


def uniform(spec: LayerSpec, seed: int, pos: Int[Array, "*P"]) -> Float[Array, "K *P"]:
    """Return a number in [0, 1) for each KV head of this layer and each position."""
    draw = _draw(spec, seed)
    drawn = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(spec.head_ids, pos.reshape(-1))
    return drawn.reshape(-1, *pos.shape)


def uniform_by_head(spec: LayerSpec, seed: int, pos: Int[Array, "B #K T"]) -> Float[Array, "B K T"]:
    """Return the numbers of `uniform` at each head's positions."""
    pos = jnp.broadcast_to(pos, (pos.shape[0], spec.num_kv_heads, pos.shape[2]))
    by_place = jax.vmap(_draw(spec, seed), (None, 0))
    return jax.vmap(jax.vmap(by_place), (None, 0))(spec.head_ids, pos)


def _draw(spec: LayerSpec, seed: int) -> Callable[[Array, Array], Array]:
    """Return the function from a head and a position to their number."""
    layer = jax.random.fold_in(randomness.random_key(seed), spec.layer)
    return lambda head, at: randomness.uniform(jax.random.fold_in(jax.random.fold_in(layer, head), at))


def uniform_in_rounds(
    spec: LayerSpec, seed: int, pos: Int[Array, "B #K T"], rounds: Int[Array, " B"]
) -> Float[Array, "B K T"]:
    """Return a number in [0, 1) for each row's round, KV head and position, with `rounds` a number of each round."""

    def by_place(key: Key[Array, ""], pos: Int[Array, " T"]) -> Float[Array, " T"]:
        return jax.vmap(lambda at: randomness.uniform(jax.random.fold_in(key, at)))(pos)

    def by_head(key: Key[Array, ""], pos: Int[Array, "K T"]) -> Float[Array, "K T"]:
        heads = jax.vmap(jax.random.fold_in, (None, 0))(key, spec.head_ids)
        return jax.vmap(by_place)(heads, pos)

    pos = jnp.broadcast_to(pos, (pos.shape[0], spec.num_kv_heads, pos.shape[2]))
    return jax.vmap(by_head)(round_keys(spec, seed, rounds), pos)


def round_keys(spec: LayerSpec, seed: int, rounds: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return a key for each row's round in this layer, [B]."""
    layer = jax.random.fold_in(randomness.random_key(seed), spec.layer)
    return jax.vmap(jax.random.fold_in, (None, 0))(layer, rounds)
