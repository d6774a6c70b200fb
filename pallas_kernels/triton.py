"""Pallas' Triton backend, and helpers that all Triton kernels share.

JAX has deprecated the backend since version 0.11: it warns on import, and later versions may not have it. Kernels
therefore import `backend` from here.
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
"""The module of the backend, None if JAX does not have it."""


def triton_unsupported(*, dim: int | None = None) -> str | None:
    """Return why the backend does not support a case, or None if it does.

    Args:
        dim: channels per head; not checked if None.
    """
    if backend is None:
        return f"jax {jax.__version__} has no Triton backend for Pallas"
    if dim is not None and (dim & (dim - 1) or not 16 <= dim <= 256):
        return f"head dim {dim} is not a power of two from 16 to 256"
    return None


def triton_call(
    body: Callable[..., Any], *, warps: int, stages: int | None = None, **options: Any
) -> Callable[..., Any]:
    """Return a `pallas_call` of a kernel for this backend, with the given number of warps and pipeline stages."""

    def call(*inputs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            params = backend.CompilerParams(num_warps=warps, num_stages=stages)
            return pl.pallas_call(body, compiler_params=params, **options)(*inputs)

    return call


def entry(x: Array | jax.ShapeDtypeStruct, each: int = 1) -> pl.BlockSpec:
    """Return the block spec that gives each program one entry of an array, by its index along the first grid axis.

    Args:
        x: the array.
        each: number of neighbouring programs that share an entry.
    """

    def at(program: Any, *_: Any) -> tuple[Any, ...]:
        return (program if each == 1 else program // each, *[0] * (len(x.shape) - 1))

    return pl.BlockSpec((None, *x.shape[1:]), at)


def load_heads(ref: Any, channel: Array) -> Array:
    """Load channels of all heads [R, H]. Triton's shapes are powers of two, so rows of zeros may follow."""
    count = ref.shape[0]
    row = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    if row.size == count:
        return backend.load(ref.at[row[:, None], channel[None]])
    mask = jnp.broadcast_to((row < count)[:, None], (row.size, channel.size))
    return backend.load(ref.at[row[:, None], channel[None]], mask=mask, other=jnp.zeros((), ref.dtype))


def store_heads(ref: Any, x: Array, channel: Array | None = None) -> None:
    """Store heads [R, ...], without the rows that `load_heads` added. `channel` has the channels, if they are not all."""
    count = ref.shape[0]
    if len(x) == count and channel is None:
        ref[...] = x
        return
    places = [jnp.arange(size, dtype=jnp.int32) for size in x.shape]
    if channel is not None:
        places[1] = channel
    index = [place.reshape([-1 if i == axis else 1 for i in range(x.ndim)]) for axis, place in enumerate(places)]
    backend.store(ref.at[*index], x, mask=jnp.broadcast_to(index[0] < count, x.shape))


def rotated_heads(ref: Any, *tables: Any) -> Array:
    """Load heads [R, H] as `load_heads` does, and rotate them in float32 if cosines and sines [1, H/2] are given.

    The other half of each channel pair is loaded separately, since Triton cannot concatenate the two halves.
    """
    count, dim = ref.shape
    channel = jnp.arange(dim, dtype=jnp.int32)
    heads = ref[...] if pl.next_power_of_2(count) == count else load_heads(ref, channel)
    if not tables:
        return heads
    pair = channel % (dim // 2)
    cos, sin = (backend.load(table.at[0, pair])[None] for table in tables)
    partner = load_heads(ref, (channel + dim // 2) % dim).astype(jnp.float32)
    sign = jnp.where(channel < dim // 2, -1.0, 1.0)[None]
    return (heads.astype(jnp.float32) * cos + sign * partner * sin).astype(ref.dtype)


def dividing_block(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)
