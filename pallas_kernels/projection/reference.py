"""The same, readably: what XLA makes of it on any device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..device import target
from .quantized import Matrix, QuantizedMatrix, multiplied
from .types import Norm

NARROW = 2048
"""Matrices of fewer outputs are multiplied as one, where they are neighbours of one size and there are many rows, on GPUs: with the
keys' and values' 1024 outputs a product of 32768 tokens runs at 470 TFLOP/s on an H200, with both at 750.
"""

MANY = 1024
"""Rows for which that pays: the matrices themselves are copied."""


def projection(
    x: Float[Array, "*B D"],
    weights: Sequence[Matrix],
    *,
    norm: Norm | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any,
) -> list[Float[Array, "*B _"]]:
    """One product after the other, each rounded to the type of `x` before anything is added to it."""
    x = x if norm is None else norm(x)
    products = [product for together in _groups(x, weights) for product in _products(x, together, dtype)]
    if residual is None:
        return products
    sums = [residual + product for product in products]
    # XLA's TPU compiler would add up again, wherever it is read, what products with such matrices made of the stream: all of them would stay
    # in memory to the last layer (of Llama-3.1-8B's shape and blocks of 4096 tokens 120 MB per layer).
    return jax.lax.optimization_barrier(sums) if any(isinstance(w, QuantizedMatrix) for w in weights) else sums


def gated_projection(
    x: Float[Array, "*B D"], weights: Sequence[Matrix], *, norm: Norm | None = None
) -> Float[Array, "*B O"]:
    """silu(gate x) · up x."""
    x, (gate, up) = x if norm is None else norm(x), weights
    return jax.nn.silu(_product(x, gate, x.dtype)) * _product(x, up, x.dtype)


def _groups(x: Array, weights: Sequence[Matrix]) -> list[list[Any]]:
    """The matrices, in order; in one group those that are to be multiplied at once."""
    many = target().platform == "gpu" and x.size // x.shape[-1] >= MANY
    groups: list[list[Any]] = []
    for w in weights:
        quantized = any(isinstance(each, QuantizedMatrix) for each in (w, *(groups[-1] if groups else ())))
        if many and groups and not quantized and groups[-1][0].shape == w.shape and w.shape[0] < NARROW:
            groups[-1].append(w)
        else:
            groups.append([w])
    return groups


def _products(x: Float[Array, "*B D"], weights: Sequence[Any], dtype: Any) -> list[Float[Array, "*B O"]]:
    """Those of one group."""
    if len(weights) == 1:
        return [_product(x, weights[0], dtype)]
    return jnp.split(_product(x, jnp.concatenate(weights), dtype), len(weights), axis=-1)


def _product(x: Float[Array, "*B D"], w: Matrix, dtype: Any) -> Float[Array, "*B O"]:
    """Accumulated in float32 and rounded once. (Asked for float32 first, XLA writes that and rounds it in a kernel of its own: 0.8 ms a
    layer of Llama-3.1-8B's shape at 16384 tokens on an H200, a twentieth of the prefill.)
    """
    if isinstance(w, QuantizedMatrix):
        return multiplied(x, w, dtype)
    return jnp.einsum("...d,od->...o", x, w, preferred_element_type=dtype)
