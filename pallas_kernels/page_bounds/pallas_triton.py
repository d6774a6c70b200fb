"""Bounds of pages on GPUs, as a Triton kernel: one program a row and KV head.

In XLA the rotation and the comparison are a kernel, and the writing another.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..decode_attention.pallas_triton import turned_heads
from ..device import triton_unsupported
from ..rotary import DeferredRope, parts_of


def unsupported_reason(bounds: Array, *_: Any, **__: Any) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    dim = bounds.shape[-1] // 2
    if reason := triton_unsupported():
        return reason
    if dim & (dim - 1) or dim < 16:
        return f"head dim {dim} is not a power of two from 16 on"
    return None


@functools.partial(jax.jit, static_argnames=("page", "interpret"))
def widen_bounds(
    bounds: Float[Array, "B K P W"],
    key: Float[Array, "B K H"] | DeferredRope,
    pos: Int[Array, " B"],
    *,
    page: int,
    interpret: bool = False,
) -> Float[Array, "B K P W"]:
    """Bounds with a new token; see the public function."""
    x, *tables = parts_of(key)
    batch, heads, pages, width = bounds.shape
    dim = width // 2
    whole = pl.BlockSpec((None, pages, width), lambda head: (head, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        widened = pl.pallas_call(
            functools.partial(_body, page=page),
            grid=(batch * heads,),
            in_specs=[
                pl.BlockSpec((None, 1, dim), lambda head: (head, 0, 0)),
                *[pl.BlockSpec((1, dim // 2), lambda head: (head // heads, 0)) for _ in tables],
                pl.BlockSpec((1,), lambda head: (head // heads,)),
                whole,
            ],
            out_specs=whole,
            out_shape=jax.ShapeDtypeStruct((batch * heads, pages, width), bounds.dtype),
            input_output_aliases={2 + len(tables): 0},
            compiler_params=backend.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="widen_bounds",
        )(x.reshape(-1, 1, dim), *tables, pos, bounds.reshape(-1, pages, width))
    return widened.reshape(bounds.shape)


def _body(key_ref: Any, *refs: Any, page: int) -> None:
    """One head's newest page."""
    *tables, pos_ref, _, bounds_ref = refs
    dim, pos = key_ref.shape[1], pos_ref[0]
    number, first = pos // page, pos % page == 0
    low_ref, high_ref = (bounds_ref.at[pl.ds(number, 1), pl.ds(begin, dim)] for begin in (0, dim))
    key = turned_heads(key_ref, *tables).astype(bounds_ref.dtype)

    @pl.when(number < bounds_ref.shape[0])
    def _widen() -> None:
        low, high = low_ref[...], high_ref[...]
        low_ref[...] = jnp.where(first, key, jnp.minimum(low, key))
        high_ref[...] = jnp.where(first, key, jnp.maximum(high, key))
