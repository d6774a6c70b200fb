"""Tokens from one cluster's sum to another's, as a Triton kernel that only reads those that move."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

TOKENS, AT_ONCE = 64, 8
"""Of a program, and of these read at a time."""


def transfer(
    sums: Float[Array, "B K P M H"],
    x: Float[Array, "B K T H"],
    units: Float[Array, "B K P H"],
    leaving: Int[Array, "B K T"],
    coming: Int[Array, "B K T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B K P M H"]:
    """Tokens taken out of the sums of the clusters that they leave, and added to those that they come to; M for none.

    Args:
        units: powers of two, of which each part of a token is a multiple: the second of what the first leaves.
    """
    batch, heads, count, size, dim = sums.shape
    fold, tokens = batch * heads, x.shape[2]
    inputs = x.reshape(fold, tokens, dim), units.reshape(fold, count, dim), *(
        labels.reshape(fold, tokens) for labels in (leaving, coming)
    )  # fmt: skip

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda g, i: (g, *(0 for _ in shape)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        written = pl.pallas_call(
            _body,
            grid=(fold, pl.cdiv(tokens, TOKENS)),
            in_specs=[whole(tokens, dim), whole(count, dim), whole(tokens), whole(tokens), whole(count * size, dim)],
            out_specs=whole(count * size, dim),
            out_shape=jax.ShapeDtypeStruct((fold, count * size, dim), jnp.float32),
            input_output_aliases={len(inputs): 0},
            compiler_params=backend.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="kmeans_transfer",
        )(*inputs, sums.reshape(fold, count * size, dim))
    return written.reshape(sums.shape)


def _body(x_ref: Any, units_ref: Any, leaving_ref: Any, coming_ref: Any, _: Any, sums_ref: Any) -> None:
    """Some tokens: most are where they were, and not even read."""
    from jax.experimental.pallas import triton as backend

    tokens, dim = x_ref.shape
    size = sums_ref.shape[0] // units_ref.shape[0]
    first, channels = pl.program_id(1) * TOKENS, pl.ds(0, dim)

    def any_of(begin: Array, count: int) -> Array:
        """Whether any of `count` tokens moves."""
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
    """One token, part by part."""
    from jax.experimental.pallas import triton as backend

    count, dim = units_ref.shape
    size, rest = sums_ref.shape[0] // count, row.astype(jnp.float32)
    for part in range(count):
        unit = units_ref[part]
        rounded = jnp.floor(rest * (1 / unit) + 0.5) * unit  # Pallas' Triton has no rounding to the nearest
        rest -= rounded
        for cluster, change in ((leaving, -rounded), (coming, rounded)):

            @pl.when(cluster < size)
            def _add(part: int = part, cluster: Array = cluster, change: Array = change) -> None:
                backend.atomic_add(sums_ref, (part * size + cluster, pl.ds(0, dim)), change)
