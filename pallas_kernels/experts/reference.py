"""XLA references of `expert_mlp` and `best_experts`.

`Op` in `api.py` calls them if no kernel supports the case. Kernels must match it, up to rounding.

Pairs of a token and one of its experts are sorted by expert and cut into tiles of one expert each. A loop over the tiles
reads the expert's matrices from the stacked ones. The few pairs of a decoding step have a tile each, so that only their
experts are read. Nothing is dropped: there is room for any load of the experts.

The loop is used instead of `jax.lax.ragged_dot`. On CPU, XLA computes that as a matmul of all pairs with every expert. On
TPU, XLA has a native version, but its outputs and hidden units of all pairs are in memory at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..activations import gated
from ..device import sliced_rows
from ..projection import Matrix, Norm, gated_projection, projection
from .tiles import Biases, Tiles, sorted_pairs, tile_size, tiles

FEW_PAIRS = 128
"""Maximum number of pairs of a token and an expert that have a tile each."""

SMALLEST_TILE, LARGEST_TILE = 8, 256
"""Pairs of a tile, where there are more of them."""


def best_experts(
    logits: Float[Array, "R E"], *, count: int, normalized: bool, scale: float
) -> tuple[Int[Array, "R k"], Float[Array, "R k"]]:
    """Choose each token's experts; see the public function."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    if normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    weights = weights if scale == 1.0 else weights * scale
    return experts.astype(jnp.int32), weights.astype(logits.dtype).astype(jnp.float32)


def expert_mlp(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    biases: Biases | None = None,
    *,
    norm: Norm | None,
    activation: str,
    total: int | None,
) -> Float[Array, "R D"]:
    """Sum the outputs of each token's experts; see the public function."""
    x = x if norm is None else norm(x)
    pairs, local = experts.size, down.shape[0] // x.shape[1]
    width = gate.shape[0] // local
    size = 1 if pairs <= FEW_PAIRS else tile_size(pairs, total or local, SMALLEST_TILE, LARGEST_TILE)
    own, order = sorted_pairs(experts, local)
    row, weight = order // experts.shape[1], weights.reshape(-1)[order]

    def add(out: Float[Array, "R D"], tile: Tiles) -> Float[Array, "R D"]:
        place = tile.start + jnp.arange(size, dtype=jnp.int32)
        exists = (place < tile.stop)[:, None]
        at = jnp.minimum(place, pairs - 1)
        sizes = width, width, x.shape[1]
        matrices = [_of(w, tile.expert, n) for w, n in zip((gate, up, down), sizes, strict=True)]
        if biases is None:
            y = _through(x[row[at]], *matrices, activation=activation)
        else:
            added = [_of(b, tile.expert, n) for b, n in zip(biases, sizes, strict=True)]
            y = _through_biased(x[row[at]], *matrices, *added, activation=activation)
        return out.at[row[at]].add(jnp.where(exists, y * weight[at][:, None], 0.0))

    def step(out: Float[Array, "R D"], tile: Tiles) -> tuple[Float[Array, "R D"], None]:
        if size == 1 and total is None:  # no tile is empty
            return add(out, tile), None
        return jax.lax.cond(tile.stop > tile.start, add, lambda out, tile: out, out, tile), None

    return jax.lax.scan(step, jnp.zeros(x.shape, jnp.float32), tiles(own, local, size))[0]


def _through(x: Array, gate: Any, up: Any, down: Any, *, activation: str) -> Float[Array, "P D"]:
    """Output of one expert, in float32."""
    h = gated_projection(x, gate, up) if activation == "silu" else gated(activation, *projection(x, gate, up))
    return projection(h, down, dtype=jnp.float32)[0]


def _through_biased(
    x: Array, gate: Any, up: Any, down: Any, gate_bias: Array, up_bias: Array, down_bias: Array, *, activation: str
) -> Float[Array, "P D"]:
    """Output of one expert with biases, in float32."""

    def biased(y: Array, bias: Array) -> Array:
        return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)

    first, second = projection(x, gate, up)
    h = gated(activation, biased(first, gate_bias), biased(second, up_bias))
    return biased(projection(h, down, dtype=jnp.float32)[0], down_bias)


def _of(matrix: Any, expert: Int[Array, ""], size: int) -> Any:
    """One expert's rows of a stacked matrix."""
    return jax.tree.map(lambda x: sliced_rows(x, expert * size, size), matrix)
