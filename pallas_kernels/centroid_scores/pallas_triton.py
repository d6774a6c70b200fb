"""Products with centroids on GPUs, as a Triton kernel: one program a row, KV head and block of centroids, which it reads once for all queries.

XLA reads them once a query, and rotates these in a kernel of their own.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..decode_attention.pallas_triton import turned_heads
from ..device import triton_unsupported
from ..rotary import DeferredRope, parts_of
from ..tuning import tuned


def unsupported_reason(q: Array | DeferredRope, centroids: Array) -> str | None:
    """Why this kernel does not serve a case, or None if it does."""
    dim, group = centroids.shape[-1], parts_of(q)[0].shape[1] // centroids.shape[1]
    if reason := triton_unsupported():
        return reason
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"head dim {dim} is not a power of two from 16 to 256"
    if group & (group - 1):
        return f"{group} query heads for a KV head is not a power of two"
    if centroids.dtype != jnp.float32:
        return f"centroids are {centroids.dtype}"
    return None


def centroid_scores(
    q: Float[Array, "B N H"] | DeferredRope,
    centroids: Float[Array, "B K M H"],
    *,
    interpret: bool = False,
    sizes: dict[str, int] | None = None,
) -> Float[Array, "B K G M"]:
    """Products; see the public function.

    Args:
        sizes: `centroids` of a program, a power of two, and its `warps`, instead of the tuned ones.
    """
    batch, kv_heads, count, dim = centroids.shape
    if sizes is None:
        case = {"heads": batch * kv_heads, "clusters": count, "head_dim": dim}
        sizes = tuned("centroid_scores", case, {"centroids": 32, "warps": 4})
    return _call(q, centroids, block=sizes["centroids"], warps=sizes["warps"], interpret=interpret)


@functools.partial(jax.jit, static_argnames=("block", "warps", "interpret"))
def _call(
    q: Float[Array, "B N H"] | DeferredRope,
    centroids: Float[Array, "B K M H"],
    *,
    block: int,
    warps: int,
    interpret: bool,
) -> Float[Array, "B K G M"]:
    """The kernel, traced and lowered once for all layers."""
    x, *tables = parts_of(q)
    batch, kv_heads, count, dim = centroids.shape
    fold, group = batch * kv_heads, x.shape[1] // kv_heads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton as backend

        scores = pl.pallas_call(
            functools.partial(_body, block=block),
            grid=(fold, pl.cdiv(count, block)),
            in_specs=[
                pl.BlockSpec((None, group, dim), lambda head, _: (head, 0, 0)),
                *[pl.BlockSpec((1, dim // 2), lambda head, _: (head // kv_heads, 0)) for _ in tables],
                pl.BlockSpec((None, count, dim), lambda head, _: (head, 0, 0)),
            ],
            out_specs=pl.BlockSpec((None, group, count), lambda head, _: (head, 0, 0)),
            out_shape=jax.ShapeDtypeStruct((fold, group, count), jnp.float32),
            compiler_params=backend.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name="centroid_scores",
        )(x.reshape(fold, group, dim), *tables, centroids.reshape(fold, count, dim))
    return scores.reshape(batch, kv_heads, group, count)


def _body(q_ref: Any, *refs: Any, block: int) -> None:
    """One block of centroids."""
    from jax.experimental.pallas import triton as backend

    *tables, centroids_ref, scores_ref = refs
    (group, dim), count = q_ref.shape, centroids_ref.shape[0]
    number = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    there = number < count
    centroids = backend.load(
        centroids_ref.at[number[:, None], jnp.arange(dim, dtype=jnp.int32)[None]],
        mask=jnp.broadcast_to(there[:, None], (block, dim)),
        other=0.0,
    )
    q = turned_heads(q_ref, *tables).astype(jnp.float32)
    row = jnp.arange(group, dtype=jnp.int32)
    for head in range(group):
        one = jnp.sum(jnp.where((row == head)[:, None], q, 0.0), axis=0)
        backend.store(scores_ref.at[head, number], jnp.sum(one[None] * centroids, axis=1), mask=there)
