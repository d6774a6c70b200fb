"""XLA reference of `projection` and `gated_projection`. `Op` in `api.py` calls it if no kernel supports the case."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..device import target
from .quantized import Matrix, QuantizedMatrix, multiplied
from .types import Norm

NARROW = 2048
"""Adjacent matrices of equal shape with fewer outputs than this are concatenated before the matmul.

This is done on GPUs, for at least `MANY` rows, unless a matrix is quantised. On an H200, a matmul of 32768 tokens with
the 1024 outputs of keys or values runs at 470 TFLOP/s, and with both at 750 TFLOP/s.
"""

MANY = 1024
"""Minimum number of rows for which concatenation is faster. Concatenating copies the matrices."""


def projection(
    x: Float[Array, "*B D"],
    weights: Sequence[Matrix],
    *,
    norm: Norm | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any,
) -> list[Float[Array, "*B _"]]:
    """Multiply `x` by each matrix; see `api.projection`.

    Returns one product per matrix, rounded to `dtype` before the bias and before the residual are added. The public function allows
    `residual` for a single matrix only.
    """
    x = x if norm is None else norm(x)
    products = [product for together in _groups(x, weights) for product in _products(x, together, dtype)]
    if biases is not None:
        pairs = zip(products, biases, strict=True)
        products = [y if b is None else y + jnp.broadcast_to(b.astype(y.dtype), y.shape) for y, b in pairs]
    if residual is None:
        return products
    sums = [residual + product for product in products]
    # Without the barrier, XLA's TPU compiler would recompute the residual sums wherever they are read. All products
    # with quantised matrices would then stay in memory until the last layer: 120 MB per layer for Llama-3.1-8B's shape
    # and blocks of 4096 tokens.
    return jax.lax.optimization_barrier(sums) if any(isinstance(w, QuantizedMatrix) for w in weights) else sums


def gated_projection(
    x: Float[Array, "*B D"], weights: Sequence[Matrix], *, norm: Norm | None = None
) -> Float[Array, "*B O"]:
    """Compute silu(gate x) · up x; see `api.gated_projection`. `weights` are the two matrices (gate, up)."""
    x, (gate, up) = x if norm is None else norm(x), weights
    return jax.nn.silu(_product(x, gate, x.dtype)) * _product(x, up, x.dtype)


def _groups(x: Array, weights: Sequence[Matrix]) -> list[list[Any]]:
    """Group adjacent matrices. The matrices of a group are concatenated and multiplied at once; see `NARROW`."""
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
    """Multiply by the matrices of one group."""
    if len(weights) == 1:
        return [_product(x, weights[0], dtype)]
    return jnp.split(_product(x, jnp.concatenate(weights), dtype), len(weights), axis=-1)


def _product(x: Float[Array, "*B D"], w: Matrix, dtype: Any) -> Float[Array, "*B O"]:
    """Multiply, accumulating in float32 and rounding once.

    With an einsum to float32 followed by a cast, XLA would write float32 and round it in a separate kernel. For
    Llama-3.1-8B's shape and 16384 tokens on an H200 this costs 0.8 ms per layer, a twentieth of prefill.
    """
    if isinstance(w, QuantizedMatrix):
        return multiplied(x, w, dtype)
    return jnp.einsum("...d,od->...o", x, w, preferred_element_type=dtype)
