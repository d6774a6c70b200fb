"""Helpers that the Mosaic GPU kernels share on Hopper GPUs, whose warpgroups multiply matrices with `wgmma`."""

import inspect
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..device import hopper

LOG2_E = math.log2(math.e)
"""log2(e). Kernels compute exponentials as powers of two, for which the GPU has an instruction."""

SWIZZLE = 128
"""Swizzle of shared memory, in bytes."""


def wgmma_unsupported(q: Array, k: Array, dims: tuple[int, ...] = (64, 128)) -> str | None:
    """Return why a kernel with `wgmma` for these head dims does not support queries and keys, or None if it does."""
    if not hopper():
        return "this program is not for a Hopper GPU"
    if q.dtype != k.dtype or k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {q.dtype} and keys {k.dtype}"
    return None if k.shape[-1] in dims else f"head dim {k.shape[-1]} is none of {', '.join(map(str, dims))}"


def tiled(plgpu: Any) -> tuple[Any, ...]:
    """Return the tiling and swizzle of matmul operands in shared memory."""
    return plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)


def along_rows(plgpu: Any, rows: int, fill: float) -> Array:
    """Return a vector with one value per row of a matmul's result."""
    return plgpu.layout_cast(jnp.full((rows,), fill, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def sync_warps(plgpu: Any, barrier: Any) -> None:
    """Wait until all warps have read what will be overwritten.

    A `wgmma` ends for each warp by itself, and the TMA does not wait for any warp.
    """
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def load_all(plgpu: Any, ref: Any, layout: Any) -> Array:
    """Load a whole array in the given layout.

    JAX 0.10 requires an index argument, 0.11 makes it optional, and later versions do not have it.
    """
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is inspect.Parameter.empty
    return plgpu.load(ref, *(((),) if needed else ()), layout=layout)
