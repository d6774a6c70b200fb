"""The mixture of experts of one layer.

Pairs of a token and one of its experts are sorted by expert and cut into tiles of one expert each. A loop over the tiles
reads the expert's matrices from the stacked ones. The few pairs of a decoding step have a tile each, so that only their
experts are read. Nothing is dropped: there is room for any load of the experts.

The loop is used instead of `jax.lax.ragged_dot`. On CPU, XLA computes that as a matmul of all pairs with every expert. On
TPU, XLA has a native version, but its outputs and hidden units of all pairs are in memory at once.

Over a mesh, each device has some of the experts, whole, and computes the pairs of these. An all-reduce adds the outputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Shard
from kvjax.config import MoEConfig
from kvjax.pallas_kernels import projection

from .layer import Layer
from .mlp import hidden_units
from .params import MLP, Experts
from .residual import add_summed

FEW_PAIRS = 128
"""Maximum number of pairs of a token and an expert that have a tile each."""

SMALLEST_TILE, LARGEST_TILE = 8, 256
"""Pairs of a tile, where there are more of them."""


class _Tiles(NamedTuple):
    """Tiles of pairs that are sorted by expert. M tiles.

    Attributes:
        expert: the tile's expert among those of this device.
        start: the tile's first pair.
        stop: end of the tile's pairs, at most `start` if it has none.
    """

    expert: Int[Array, " M"]
    start: Int[Array, " M"]
    stop: Int[Array, " M"]


def add_experts(layer: Layer, p: Experts, x: Float[Array, "... D"], shard: Shard) -> Float[Array, "... D"]:
    """Add the output of a layer's experts to the residual stream `x`."""
    config = layer.config.mlp
    assert isinstance(config, MoEConfig)
    y = layer.norm(layer.params.mlp_norm)(x).reshape(-1, x.shape[-1])
    out = routed(config, p, y, shard)
    if p.shared is not None:
        (own,) = projection(hidden_units(p.shared, y, config.activation), p.shared.down, dtype=jnp.float32)
        if p.shared_gate is not None:
            own = own * jax.nn.sigmoid(projection(y, p.shared_gate, dtype=jnp.float32)[0])
        out = out + own
    return add_summed(layer, x, out.reshape(x.shape), None, layer.params.mlp_post_norm, shard)


def route(config: MoEConfig, router: Float[Array, "E D"], x: Float[Array, "R D"]) -> tuple[Array, Array]:
    """Experts of each token [R, k], and the weights of their outputs [R, k] in float32. Ties go to the first expert."""
    (logits,) = projection(x, router)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), config.per_token)
    if config.normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), weights.astype(x.dtype).astype(jnp.float32)


def routed(config: MoEConfig, p: Experts, x: Float[Array, "R D"], shard: Shard) -> Float[Array, "R D"]:
    """Weighted sum of the outputs of each token's experts in float32; over a mesh, of the experts of this device."""
    experts, weights = route(config, p.router, x)
    pairs, local = experts.size, p.gate_experts.shape[0] // config.width
    size = 1 if pairs <= FEW_PAIRS else _tile_size(pairs, config.experts)
    own = experts.reshape(-1) - shard.model_index() * local
    own = jnp.where((own >= 0) & (own < local), own, local)  # others come last, and are in no tile
    order = jnp.argsort(own, stable=True).astype(jnp.int32)
    row, weight = order // config.per_token, weights.reshape(-1)[order]

    def add(out: Float[Array, "R D"], tile: _Tiles) -> Float[Array, "R D"]:
        place = tile.start + jnp.arange(size, dtype=jnp.int32)
        exists = (place < tile.stop)[:, None]
        at = jnp.minimum(place, pairs - 1)
        mlp = _expert(config, p, tile.expert, x.shape[1])
        (y,) = projection(hidden_units(mlp, x[row[at]], config.activation), mlp.down, dtype=jnp.float32)
        return out.at[row[at]].add(jnp.where(exists, y * weight[at][:, None], 0.0))

    def step(out: Float[Array, "R D"], tile: _Tiles) -> tuple[Float[Array, "R D"], None]:
        if size == 1 and shard.model == 1:  # no tile is empty
            return add(out, tile), None
        return jax.lax.cond(tile.stop > tile.start, add, lambda out, tile: out, out, tile), None

    out = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(step, out, _tiles(own, local, size))[0]


def _tile_size(pairs: int, experts: int) -> int:
    """Pairs of a tile: a power of two, about half of the pairs of an expert if the load is even."""
    size = SMALLEST_TILE
    while size < LARGEST_TILE and 4 * size * experts <= pairs:
        size *= 2
    return size


def _tiles(own: Int[Array, " P"], experts: int, size: int) -> _Tiles:
    """Tiles of `size` pairs, for any load of the experts. Pairs of expert number `experts` are in none."""
    count = jnp.zeros(experts + 1, jnp.int32).at[own].add(1)[:experts]
    tiles = -(-count // size)
    last_tile, last_pair = jnp.cumsum(tiles, dtype=jnp.int32), jnp.cumsum(count, dtype=jnp.int32)
    most = own.size if size == 1 else own.size // size + experts
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, number, side="right").astype(jnp.int32)
    exists, expert = expert < experts, jnp.minimum(expert, experts - 1)
    start = (last_pair - count)[expert] + (number - (last_tile - tiles)[expert]) * size
    return _Tiles(expert, start, jnp.where(exists, last_pair[expert], start))


def _expert(config: MoEConfig, p: Experts, expert: Int[Array, ""], width: int) -> MLP:
    """Matrices of one expert."""

    def rows(matrix: Any, size: int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, expert * size, size), matrix)

    return MLP(rows(p.gate_experts, config.width), rows(p.up_experts, config.width), rows(p.down_experts, width))
