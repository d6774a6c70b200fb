"""Triton kernels of `page_scores`, `centroid_scores` and `widen_bounds`: scores of pages and clusters of keys.

`Op` in `api.py` calls each for the cases that its `..._unsupported_reason` permits. Results must match `reference.py`
up to rounding.

The score kernels run one program per sequence, KV head and block of pages or centroids. A program reads its block once
for all query heads of the group. In XLA, `page_scores` is three kernels, each of which takes longer to launch than to
run: splitting the queries, the matmul, and masking. XLA also rotates queries in a separate kernel and reads the
centroids once per query head.

`widen_bounds` runs one program per sequence and KV head. XLA uses one kernel to rotate and compare, and another to
write.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..products import dot
from ..rotary import DeferredRope, parts_of
from ..triton import backend, entry, rotated_heads, triton_call, triton_unsupported
from ..tuning import tuned


def page_scores_unsupported_reason(q: Array | DeferredRope, bounds: Array, *_: Any, **__: Any) -> str | None:
    """Return why the kernel of `page_scores` does not support a case, or None if it does."""
    x = parts_of(q)[0]
    if reason := triton_unsupported(dim=x.shape[2]):
        return reason
    if x.dtype != bounds.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {x.dtype} and bounds {bounds.dtype}"
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
    """Compute page scores; see the public function.

    Args:
        sizes: `pages` per program (a power of two) and `warps`, instead of the tuned sizes.
    """
    batch, heads, dim = parts_of(q)[0].shape
    kv_heads, size = bounds.shape[1:3]
    if sizes is None:
        case = {"heads": batch * kv_heads, "pages": size, "group": heads // kv_heads, "head_dim": dim}
        sizes = tuned("page_scores", case | {"dtype": bounds.dtype.name}, {"pages": 64, "warps": 4})
    block, warps = sizes["pages"], sizes["warps"]
    scores = _scores(q, bounds, [tokens], name="page_scores", page=page, block=block, warps=warps, interpret=interpret)
    return scores.reshape(batch, heads, size)


def centroid_scores_unsupported_reason(q: Array | DeferredRope, centroids: Array) -> str | None:
    """Return why the kernel of `centroid_scores` does not support a case, or None if it does."""
    if reason := triton_unsupported(dim=centroids.shape[-1]):
        return reason
    return None if centroids.dtype == jnp.float32 else f"centroids are {centroids.dtype}"


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    centroids: Float[Array, "B K M H"],
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B K G M"]:
    """Compute inner products with centroids; see the public function.

    Args:
        sizes: `centroids` per program (a power of two) and `warps`, instead of the tuned sizes.
    """
    batch, kv_heads, count, dim = centroids.shape
    if sizes is None:
        case = {"heads": batch * kv_heads, "clusters": count, "head_dim": dim}
        sizes = tuned("centroid_scores", case, {"centroids": 32, "warps": 4})
    block, warps = sizes["centroids"], sizes["warps"]
    return _scores(q, centroids, [], name="centroid_scores", block=block, warps=warps, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("name", "page", "block", "warps", "interpret"))
def _scores(
    q: Float[Array, "B N H"] | DeferredRope,
    blocks: Float[Array, "B K S W"],
    tokens: Sequence[Int[Array, " B"]],
    *,
    name: str,
    page: int | None = None,
    block: int,
    warps: int,
    interpret: bool,
) -> Float[Array, "B K G S"]:
    """Call the kernel of pages if `page` is given, else that of centroids. It is traced and lowered once for all
    layers.
    """
    x, *tables = parts_of(q)
    batch, kv_heads, size, width = blocks.shape
    fold, group, dim = batch * kv_heads, x.shape[1] // kv_heads, x.shape[2]
    queries, blocks = x.reshape(fold, group, dim), blocks.reshape(fold, size, width)
    shape = jax.ShapeDtypeStruct((fold, group, size), jnp.float32)
    scores = triton_call(
        functools.partial(_centroids_body if page is None else functools.partial(_pages_body, page=page), block=block),
        grid=(fold, pl.cdiv(size, block)),
        in_specs=[
            entry(queries),
            *[pl.BlockSpec((1, dim // 2), lambda head, _: (head // kv_heads, 0)) for _ in tables],
            entry(blocks),
            *[pl.BlockSpec((1,), lambda head, _: (head // kv_heads,)) for _ in tokens],
        ],
        out_specs=entry(shape),
        out_shape=shape,
        warps=warps,
        stages=1,
        interpret=interpret,
        name=name,
    )(queries, *tables, blocks, *tokens)
    return scores.reshape(batch, kv_heads, group, size)


def _pages_body(q_ref: Any, *refs: Any, page: int, block: int) -> None:
    """Score one block of pages. Pages after the sequence's tokens are not read."""
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

    q = rotated_heads(q_ref, *tables)
    zero = jnp.zeros((), q.dtype)
    scores = dot(jnp.minimum(q, zero), bound(0), 1) + dot(jnp.maximum(q, zero), bound(dim), 1)
    row = jnp.arange(len(q), dtype=jnp.int32)[:, None]
    backend.store(
        scores_ref.at[row, number[None]],
        jnp.where(there[None], scores, -jnp.inf),
        mask=(row < group) & (number < size)[None],
    )


def _centroids_body(q_ref: Any, *refs: Any, block: int) -> None:
    """Score one block of centroids."""
    *tables, centroids_ref, scores_ref = refs
    (group, dim), count = q_ref.shape, centroids_ref.shape[0]
    number = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    there = number < count
    centroids = backend.load(
        centroids_ref.at[number[:, None], jnp.arange(dim, dtype=jnp.int32)[None]],
        mask=jnp.broadcast_to(there[:, None], (block, dim)),
        other=0.0,
    )
    q = rotated_heads(q_ref, *tables).astype(jnp.float32)
    row = jnp.arange(len(q), dtype=jnp.int32)
    for head in range(group):
        one = jnp.sum(jnp.where((row == head)[:, None], q, 0.0), axis=0)
        backend.store(scores_ref.at[head, number], jnp.sum(one[None] * centroids, axis=1), mask=there)


def widen_bounds_unsupported_reason(bounds: Array, *_: Any, **__: Any) -> str | None:
    """Return why the kernel of `widen_bounds` does not support a case, or None if it does."""
    dim = bounds.shape[-1] // 2
    if reason := triton_unsupported():
        return reason
    if dim & (dim - 1) or dim < 16:
        return f"head dim {dim} is not a power of two of at least 16"
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
    """Extend the bounds by a new token; see the public function."""
    x, *tables = parts_of(key)
    batch, heads, pages, width = bounds.shape
    dim = width // 2
    keys, folded = x.reshape(-1, 1, dim), bounds.reshape(-1, pages, width)
    widened = triton_call(
        functools.partial(_widen_body, page=page),
        grid=(batch * heads,),
        in_specs=[
            entry(keys),
            *[pl.BlockSpec((1, dim // 2), lambda head: (head // heads, 0)) for _ in tables],
            pl.BlockSpec((1,), lambda head: (head // heads,)),
            entry(folded),
        ],
        out_specs=entry(folded),
        out_shape=jax.ShapeDtypeStruct(folded.shape, folded.dtype),
        input_output_aliases={2 + len(tables): 0},
        warps=1,
        stages=1,
        interpret=interpret,
        name="widen_bounds",
    )(keys, *tables, pos, folded)
    return widened.reshape(bounds.shape)


def _widen_body(key_ref: Any, *refs: Any, page: int) -> None:
    """Update the newest page of one head."""
    *tables, pos_ref, _, bounds_ref = refs
    dim, pos = key_ref.shape[1], pos_ref[0]
    number, first = pos // page, pos % page == 0
    low_ref, high_ref = (bounds_ref.at[pl.ds(number, 1), pl.ds(begin, dim)] for begin in (0, dim))
    key = rotated_heads(key_ref, *tables).astype(bounds_ref.dtype)

    @pl.when(number < bounds_ref.shape[0])
    def _widen() -> None:
        low, high = low_ref[...], high_ref[...]
        low_ref[...] = jnp.where(first, key, jnp.minimum(low, key))
        high_ref[...] = jnp.where(first, key, jnp.maximum(high, key))
