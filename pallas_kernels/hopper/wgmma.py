"""What kernels in Pallas' Mosaic dialect share on Hopper GPUs, whose warpgroups multiply matrices by `wgmma`."""

import inspect
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..device import hopper

LOG2_E = math.log2(math.e)
"""Exponentials are taken as powers of two, which the processor has an instruction for."""

SWIZZLE = 128
"""Bytes of a row of shared memory that are interleaved."""


def wgmma_unsupported(q: Array, k: Array) -> str | None:
    """Why queries and keys are not multiplied so, or None if they are."""
    if not hopper():
        return "this program is not for a Hopper GPU"
    if q.dtype != k.dtype or k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {q.dtype} and keys {k.dtype}"
    return None if k.shape[-1] in (64, 128) else f"head dim {k.shape[-1]} is neither 64 nor 128"


def tiled(plgpu: Any) -> tuple[Any, ...]:
    """How operands lie in shared memory."""
    return plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)


def along_rows(plgpu: Any, rows: int, fill: float) -> Array:
    """A number for each row of a product."""
    return plgpu.layout_cast(jnp.full((rows,), fill, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def meet(plgpu: Any, barrier: Any) -> None:
    """Until all warps have read what is to be overwritten: a product ends for each warp by itself, and the copy engine waits for none."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def load_all(plgpu: Any, ref: Any, layout: Any) -> Array:
    """All of an array in memory, in a layout. (JAX 0.10 wants an index, 0.11 wants none but has the argument, later versions do not.)"""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is inspect.Parameter.empty
    return plgpu.load(ref, *(((),) if needed else ()), layout=layout)
