"""Tiles of pairs of a token and one of its experts, sorted by expert, and what the kernels of both sizes need."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..triton import triton_unsupported


class Biases(NamedTuple):
    """Biases of the projections of all experts, expert after expert. E experts, F hidden units, D model dim."""

    gate: Float[Array, " EF"]
    up: Float[Array, " EF"]
    down: Float[Array, " ED"]


def unsupported(x: Any, gate: Any, up: Any, down: Any) -> str | None:
    """Return why no Triton kernel supports these arrays in bfloat16, or None if one does."""
    if reason := triton_unsupported():
        return reason
    if not all(isinstance(w, jax.Array) and w.dtype == jnp.bfloat16 for w in (x, gate, up, down)):
        return "not all arrays are bfloat16"
    if x.shape[1] % 64 or down.shape[1] % 64:
        return f"{x.shape[1]} channels or {down.shape[1]} hidden units are not a multiple of 64"
    return None


class Tiles(NamedTuple):
    """Tiles of pairs that are sorted by expert. M tiles.

    Attributes:
        expert: the tile's expert.
        start: the tile's first pair.
        stop: end of the tile's pairs, at most `start` if it has none.
    """

    expert: Int[Array, " M"]
    start: Int[Array, " M"]
    stop: Int[Array, " M"]


def sorted_pairs(experts: Int[Array, "R k"], count: int) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
    """Experts of all pairs, with `count` for those that are ignored, and the pairs' order by expert."""
    own = experts.reshape(-1).astype(jnp.int32)
    own = jnp.where((own >= 0) & (own < count), own, count)  # ignored ones come last, and are in no tile
    return own, jnp.argsort(own, stable=True).astype(jnp.int32)


def tiles(own: Int[Array, " P"], experts: int, size: int) -> Tiles:
    """Tiles of `size` pairs, for any load of the experts. Pairs of expert number `experts` are in none."""
    count = jnp.zeros(experts + 1, jnp.int32).at[own].add(1)[:experts]
    needed = -(-count // size)
    last_tile, last_pair = jnp.cumsum(needed, dtype=jnp.int32), jnp.cumsum(count, dtype=jnp.int32)
    most = own.size if size == 1 else own.size // size + experts
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, number, side="right").astype(jnp.int32)
    exists, expert = expert < experts, jnp.minimum(expert, experts - 1)
    start = (last_pair - count)[expert] + (number - (last_tile - needed)[expert]) * size
    return Tiles(expert, start, jnp.where(exists, last_pair[expert], start))


def tile_size(pairs: int, experts: int, smallest: int, largest: int) -> int:
    """Pairs of a tile: a power of two, about half of the pairs of an expert if the load is even."""
    size = smallest
    while size < largest and 4 * size * experts <= pairs:
        size *= 2
    return size
