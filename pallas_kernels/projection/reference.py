"""The same, readably: what XLA makes of it on any device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .norm import Norm


def projection(
    x: Float[Array, "*B D"],
    weights: Sequence[Float[Array, "_ D"]],
    *,
    norm: Norm | None = None,
    residual: Float[Array, "*B O"] | None = None,
    dtype: Any,
) -> list[Float[Array, "*B _"]]:
    """One product after the other, each rounded to the type of `x` before anything is added to it."""
    x = x if norm is None else norm(x)
    products = [_product(x, w).astype(dtype) for w in weights]
    return products if residual is None else [residual + product for product in products]


def gated_projection(
    x: Float[Array, "*B D"], gate: Float[Array, "O D"], up: Float[Array, "O D"], *, norm: Norm | None = None
) -> Float[Array, "*B O"]:
    """silu(gate x) · up x."""
    x = x if norm is None else norm(x)
    return jax.nn.silu(_product(x, gate).astype(x.dtype)) * _product(x, up).astype(x.dtype)


def _product(x: Float[Array, "*B D"], w: Float[Array, "O D"]) -> Float[Array, "*B O"]:
    return jnp.einsum("...d,od->...o", x, w, preferred_element_type=jnp.float32)
