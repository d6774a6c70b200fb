"""Pallas' Triton backend, deprecated since JAX 0.11, and what all kernels for it share.

Modules of kernels take `backend` from here: it may not exist, and says when it is imported that it is deprecated.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array


def _import() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return importlib.import_module("jax.experimental.pallas.triton")
        except ImportError:
            return None


backend = _import()
"""The backend's module, None if JAX has none."""


def triton_unsupported(*, dim: int | None = None, group: int | None = None) -> str | None:
    """Why the backend cannot be used, or not for heads of `dim` channels or `group` query heads for a KV head; None if it can."""
    if backend is None:
        return f"jax {jax.__version__} has no Triton backend for Pallas"
    if dim is not None and (dim & (dim - 1) or not 16 <= dim <= 256):
        return f"head dim {dim} is not a power of two from 16 to 256"
    if group is not None and group & (group - 1):
        return f"{group} query heads for a KV head is not a power of two"
    return None


def triton_call(
    body: Callable[..., Any], *, warps: int, stages: int | None = None, **options: Any
) -> Callable[..., Any]:
    """`pallas_call` of a kernel for this backend, with so many warps and stages."""

    def call(*inputs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            params = backend.CompilerParams(num_warps=warps, num_stages=stages)
            return pl.pallas_call(body, compiler_params=params, **options)(*inputs)

    return call


def entry(x: Array | jax.ShapeDtypeStruct, each: int = 1) -> pl.BlockSpec:
    """The entry of an array that programs see: by their place along the grid's first axis, where `each` neighbours share one."""

    def at(program: Any, *_: Any) -> tuple[Any, ...]:
        return (program if each == 1 else program // each, *[0] * (len(x.shape) - 1))

    return pl.BlockSpec((None, *x.shape[1:]), at)


def turned_heads(ref: Any, *tables: Any) -> Array:
    """Heads [R, H], rotated in float32 if there are tables of cosines and sines [1, H/2].

    Each channel meets its partner by a second load, as halves cannot be put together.
    """
    if not tables:
        return ref[...]
    count, dim = ref.shape
    row, channel = jnp.arange(count, dtype=jnp.int32)[:, None], jnp.arange(dim, dtype=jnp.int32)
    pair = channel % (dim // 2)
    cos, sin = (backend.load(table.at[0, pair])[None] for table in tables)
    partner = backend.load(ref.at[row, ((channel + dim // 2) % dim)[None]]).astype(jnp.float32)
    sign = jnp.where(channel < dim // 2, -1.0, 1.0)[None]
    return (ref[...].astype(jnp.float32) * cos + sign * partner * sin).astype(ref.dtype)
