"""Triton kernel that moves tokens from one cluster's sum to another's. It only reads tokens that move.

`kmeans_pallas_triton.py` calls it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..triton import backend, entry, triton_call

TOKENS, AT_ONCE = 64, 8
"""Tokens per program, and tokens read at a time."""


def transfer(
    sums: Float[Array, "B K P M H"],
    x: Float[Array, "B K T H"],
    units: Float[Array, "B K P H"],
    leaving: Int[Array, "B K T"],
    coming: Int[Array, "B K T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B K P M H"]:
    """Subtract tokens from the sums of the clusters that they leave, and add them to those that they join.

    Args:
        sums: sum of each cluster's tokens, in P parts.
        x: tokens.
        units: powers of two. Part p of a token is rounded to a multiple of unit p; the second part is the first one's
            remainder.
        leaving, coming: index of the cluster that each token leaves, and joins; M for none.
        interpret: run the Pallas kernel in interpret mode.
    """
    batch, heads, count, size, dim = sums.shape
    fold, tokens = batch * heads, x.shape[2]
    inputs = [array.reshape(fold, *array.shape[2:]) for array in (x, units, leaving, coming)]
    inputs.append(sums.reshape(fold, count * size, dim))
    written = triton_call(
        _body,
        grid=(fold, pl.cdiv(tokens, TOKENS)),
        in_specs=[*map(entry, inputs)],
        out_specs=entry(inputs[-1]),
        out_shape=jax.ShapeDtypeStruct(inputs[-1].shape, jnp.float32),
        input_output_aliases={len(inputs) - 1: 0},
        warps=1,
        stages=1,
        interpret=interpret,
        name="kmeans_transfer",
    )(*inputs)
    return written.reshape(sums.shape)


def _body(x_ref: Any, units_ref: Any, leaving_ref: Any, coming_ref: Any, _: Any, sums_ref: Any) -> None:
    """Move some tokens. Most tokens do not move, and are not read."""
    tokens, dim = x_ref.shape
    size = sums_ref.shape[0] // units_ref.shape[0]
    first, channels = pl.program_id(1) * TOKENS, pl.ds(0, dim)

    def any_of(begin: Array, count: int) -> Array:
        """Return whether any of `count` tokens moves."""
        at = begin + jnp.arange(count, dtype=jnp.int32)
        labels = (backend.load(ref.at[at], mask=at < tokens, other=size) for ref in (leaving_ref, coming_ref))
        return jnp.min(jnp.minimum(*labels)) < size

    def some(i: Array, _: None) -> None:
        begin = first + i * AT_ONCE

        @pl.when(any_of(begin, AT_ONCE))
        def _these() -> None:
            moving = []
            for token in range(AT_ONCE):
                exists, at = begin + token < tokens, jnp.minimum(begin + token, tokens - 1)
                labels = [jnp.where(exists, ref[at], size) for ref in (leaving_ref, coming_ref)]
                moves = jnp.minimum(*labels) < size
                row = backend.load(
                    x_ref.at[at, channels], mask=jnp.broadcast_to(moves, (dim,)), other=jnp.zeros((), x_ref.dtype)
                )
                moving.append((moves, labels, row))
            for moves, labels, row in moving:
                pl.when(moves)(functools.partial(_move, sums_ref, units_ref, *labels, row))

    @pl.when(any_of(first, TOKENS))
    def _some() -> None:
        jax.lax.fori_loop(0, TOKENS // AT_ONCE, some, None)


def _move(sums_ref: Any, units_ref: Any, leaving: Array, coming: Array, row: Array) -> None:
    """Move one token, part by part."""
    count, dim = units_ref.shape
    size, rest = sums_ref.shape[0] // count, row.astype(jnp.float32)
    for part in range(count):
        unit = units_ref[part]
        rounded = jnp.floor(rest * (1 / unit) + 0.5) * unit  # Pallas' Triton backend has no round-to-nearest
        rest -= rounded
        for cluster, change in ((leaving, -rounded), (coming, rounded)):

            @pl.when(cluster < size)
            def _add(part: int = part, cluster: Array = cluster, change: Array = change) -> None:
                backend.atomic_add(sums_ref, (part * size + cluster, pl.ds(0, dim)), change)
