"""Bounds of products for GPUs, as a Triton kernel: one program a row, KV head and block of pages, for all queries of the group.

In XLA the two halves of the queries, the product, and leaving out pages that are not there are three kernels, each of which takes
longer to start than to compute.
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
from ..products import dot
from ..rotary import DeferredRope, parts_of
from ..tuning import tuned


def unsupported_reason(q: Array | DeferredRope, bounds: Array, *_: Any, **__: Any) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    x = parts_of(q)[0]
    dim, dtype, group = x.shape[2], x.dtype, x.shape[1] // bounds.shape[1]
    if reason := triton_unsupported():
        return reason
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head dim {dim} is not a power of two from 16 to 256"
    if group & (group - 1):
        return f"{group} query heads for a KV head is not a power of two"
    if dtype != bounds.dtype or dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {dtype} and bounds {bounds.dtype}"
    return None


def page_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    bounds: Float[Array, "B K P W"],
    tokens: Int[Array, " B"],
    *,
    page: int,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B N P"]:
    """Bounds of products; see the public function.

    Args:
        sizes: `pages` of a program, a power of two, and its `warps`, instead of the tuned ones.
    """
    batch, heads, dim = parts_of(q)[0].shape
    kv_heads, size = bounds.shape[1:3]
    if sizes is None:
        case = {"heads": batch * kv_heads, "pages": size, "group": heads // kv_heads, "head_dim": dim}
        sizes = tuned("page_scores", case | {"dtype": bounds.dtype.name}, {"pages": 64, "warps": 4})
    return _call(q, bounds, tokens, page=page, block=sizes["pages"], warps=sizes["warps"], interpret=interpret)


@functools.partial(jax.jit, static_argnames=("page", "block", "warps", "interpret"))
def _call(
    q: Float[Array, "B N H"] | DeferredRope,
    bounds: Float[Array, "B K P W"],
    tokens: Int[Array, " B"],
    *,
    page: int,
    block: int,
    warps: int,
    interpret: bool,
) -> Float[Array, "B N P"]:
    """The kernel, traced and lowered once for all layers."""
    x, *tables = parts_of(q)
    batch, heads, dim = x.shape
    kv_heads, size = bounds.shape[1:3]
    fold, group = batch * kv_heads, heads // kv_heads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        scores = pl.pallas_call(
            functools.partial(_body, page=page, block=block),
            grid=(fold, pl.cdiv(size, block)),
            in_specs=[
                pl.BlockSpec((None, group, dim), lambda head, _: (head, 0, 0)),
                *[pl.BlockSpec((1, dim // 2), lambda head, _: (head // kv_heads, 0)) for _ in tables],
                pl.BlockSpec((None, size, 2 * dim), lambda head, _: (head, 0, 0)),
                pl.BlockSpec((1,), lambda head, _: (head // kv_heads,)),
            ],
            out_specs=pl.BlockSpec((None, group, size), lambda head, _: (head, 0, 0)),
            out_shape=jax.ShapeDtypeStruct((fold, group, size), jnp.float32),
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="page_scores",
        )(x.reshape(fold, group, dim), *tables, bounds.reshape(fold, size, 2 * dim), tokens)
    return scores.reshape(batch, heads, size)


def _body(q_ref: Any, *refs: Any, page: int, block: int) -> None:
    """One block of pages; what is not there is not read."""
    from jax.experimental.pallas import triton as backend

    *tables, bounds_ref, tokens_ref, scores_ref = refs
    (group, dim), size = q_ref.shape, bounds_ref.shape[0]
    number = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    channel = jnp.arange(dim, dtype=jnp.int32)
    there = (number * page < tokens_ref[0]) & (number < size)

    def bound(first: int) -> Array:
        return backend.load(
            bounds_ref.at[number[:, None], (first + channel)[None]],
            mask=jnp.broadcast_to(there[:, None], (block, dim)),
            other=jnp.zeros((), bounds_ref.dtype),
        )

    q = turned_heads(q_ref, *tables)
    zero = jnp.zeros((), q.dtype)
    scores = dot(jnp.minimum(q, zero), bound(0), 1) + dot(jnp.maximum(q, zero), bound(dim), 1)
    row = jnp.arange(group, dtype=jnp.int32)[:, None]
    backend.store(
        scores_ref.at[row, number[None]],
        jnp.where(there[None], scores, -jnp.inf),
        mask=jnp.broadcast_to((number < size)[None], (group, block)),
    )
