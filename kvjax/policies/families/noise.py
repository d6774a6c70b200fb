"""Random numbers from seed, layer, head and position only. They do not depend on the batch or on padding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from kvjax._util import randomness
from kvjax.cache import LayerSpec


def uniform(spec: LayerSpec, seed: int, pos: Int[Array, "*P"]) -> Float[Array, "K *P"]:
    """Return a number in [0, 1) for each KV head of this layer and each position."""
    drawn = jax.vmap(jax.vmap(_draw, (None, 0)), (0, None))(head_keys(spec, seed), pos.reshape(-1))
    return drawn.reshape(-1, *pos.shape)


def uniform_by_head(spec: LayerSpec, seed: int, pos: Int[Array, "B #K T"]) -> Float[Array, "B K T"]:
    """Return the numbers of `uniform` at each head's positions."""
    pos = jnp.broadcast_to(pos, (pos.shape[0], spec.num_kv_heads, pos.shape[2]))
    by_place = jax.vmap(_draw, (None, 0))
    return jax.vmap(jax.vmap(by_place), (None, 0))(head_keys(spec, seed), pos)


def head_keys(spec: LayerSpec, seed: int) -> Key[Array, " K"]:
    """Return a key for each KV head of this layer. They are constants of a program, which compilers need not compute."""
    every = jnp.asarray(_data(seed, spec.layer, spec.whole.num_kv_heads))
    return jax.random.wrap_key_data(jnp.take(every, spec.head_ids, axis=0), impl="threefry2x32")


@functools.lru_cache
def _data(seed: int, layer: int, heads: int) -> Any:
    """Data of the keys of all heads of a layer, [K, 2], computed while programs are traced."""
    with jax.ensure_compile_time_eval():
        key = jax.random.fold_in(randomness.random_key(seed), layer)
        return np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(heads))))


def _draw(key: Key[Array, ""], at: Int[Array, ""]) -> Float[Array, ""]:
    """Return the number of a head's key and a position."""
    return randomness.uniform(jax.random.fold_in(key, at))


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
