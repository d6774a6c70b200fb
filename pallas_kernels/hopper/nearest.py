"""Mosaic GPU kernel of `nearest` for Hopper GPUs: find each query's key with the largest inner product plus bias.

`Op` in `kmeans/api.py` calls it for the cases that `unsupported_reason` permits. Results must match
`kmeans/reference.py` up to rounding.

A warpgroup keeps a block of queries in shared memory and streams blocks of keys through TMA copies. It multiplies them
by `wgmma` and compares the scores in registers. Several such programs share a multiprocessor, so that some compare
while others multiply.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..device import hopper
from ..kmeans.types import Nearest
from ..triton import triton_unsupported
from ..tuning import tuned
from .wgmma import SWIZZLE, sync_warps, tiled

SIZES = {"queries": 128, "keys": 128, "stages": 2}
"""Default block sizes, used where none were measured."""


def unsupported_reason(queries: Array, keys: Array, bias: Array | None = None) -> str | None:
    """Return why this kernel does not support a case, or is not faster than the Triton kernel; None otherwise."""
    count, size, dim = queries.shape[-2], *keys.shape[-2:]
    if not hopper():
        return "this program is not for a Hopper GPU"
    if queries.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries are {queries.dtype} and keys {keys.dtype}"
    if dim % (SWIZZLE // 2) or dim > 256:
        return f"head dim {dim} is not a multiple of {SWIZZLE // 2} up to 256"
    sizes = _sizes(queries, keys)
    if count % sizes["queries"] or size % sizes["keys"]:
        return f"{count} queries and {size} keys are not whole blocks of {sizes['queries']} and {sizes['keys']}"
    if size > 8192:
        return f"biases of {size} keys do not fit"
    if "wgmma" not in sizes and not triton_unsupported():
        return "the Triton kernel was measured to be as fast"
    return None


def nearest(
    queries: Float[Array, "*B N H"],
    keys: Float[Array, "*B M H"],
    bias: Float[Array, "*B M"] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> Nearest:
    """Find the key with the largest inner product plus bias; see the public function.

    Args:
        sizes: `queries` per program, `keys` compared at a time, and `stages` (blocks of keys in flight), instead of the
            tuned sizes.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    sizes = sizes or _sizes(queries, keys)
    *batch, count, dim = queries.shape
    groups, size = math.prod(batch), keys.shape[-2]
    rows, columns = sizes["queries"], sizes["keys"]
    steps = size // columns
    stages = min(sizes["stages"], steps)
    inputs = [queries.reshape(groups, count, dim), keys.reshape(groups, size, dim)]
    if bias is not None:
        inputs.append(bias.reshape(groups, steps, columns).astype(jnp.float32))

    def body(queries_ref: Any, keys_ref: Any, *refs: Any) -> None:
        *bias_refs, score_ref, place_ref, queries_smem, keys_smem, bias_smem, score_smem, place_smem = refs[:-3]
        ready, filled, read = refs[-3:]
        group, first = jax.lax.axis_index("group"), jax.lax.axis_index("block") * rows

        def fetch(step: Any, slot: Any) -> None:
            span = pl.ds(step * columns, columns)
            plgpu.copy_gmem_to_smem(keys_ref.at[group, span], keys_smem.at[slot], filled.at[slot])

        plgpu.copy_gmem_to_smem(queries_ref.at[group, pl.ds(first, rows)], queries_smem, ready)
        for bias_ref in bias_refs:
            plgpu.copy_gmem_to_smem(bias_ref.at[group], bias_smem, ready)
        for stage in range(stages):
            fetch(stage, stage)
        plgpu.barrier_wait(ready)
        column = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 1, layout=plgpu.Layout.WGMMA)

        def compare(step: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            score, place = best
            slot = jax.lax.rem(step, jnp.asarray(stages, step.dtype))
            plgpu.barrier_wait(filled.at[slot])

            def multiply(scores_ref: Any) -> Array:
                plgpu.wgmma(scores_ref, queries_smem, keys_smem.at[slot].T)
                return scores_ref[...]

            scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))
            sync_warps(plgpu, read)
            for _ in bias_refs:
                added = plgpu.layout_cast(bias_smem[step], plgpu.Layout.WGMMA.reduce(0))
                added = jax.lax.broadcast_in_dim(added, (rows, columns), [1])
                scores = jnp.where(added > -jnp.inf, scores + added, -jnp.inf)

            @pl.when(step + stages < steps)
            def _() -> None:
                fetch(step + stages, slot)

            top = jnp.max(scores, axis=1)
            equal = scores == jax.lax.broadcast_in_dim(top, (rows, columns), [0])
            at = jnp.min(jnp.where(equal, column, columns), axis=1)
            return jnp.maximum(score, top), jnp.where(top > score, step * columns + at, place)

        def along_rows(fill: Any, dtype: Any) -> Array:
            return plgpu.layout_cast(jnp.full((rows,), fill, dtype), plgpu.Layout.WGMMA.reduce(1))

        score, place = jax.lax.fori_loop(
            0, steps, compare, (along_rows(-jnp.inf, jnp.float32), along_rows(0, jnp.int32))
        )
        score_smem[...], place_smem[...] = score, place
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(score_smem, score_ref.at[group, pl.ds(first, rows)])
        plgpu.copy_smem_to_gmem(place_smem, place_ref.at[group, pl.ds(first, rows)])
        plgpu.wait_smem_to_gmem(0)

    score, place = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((groups, count), jnp.float32),
            jax.ShapeDtypeStruct((groups, count), jnp.int32),
        ],
        grid=(groups, count // rows),
        grid_names=("group", "block"),
        scratch_types=[
            plgpu.SMEM((rows, dim), queries.dtype, transforms=tiled(plgpu)),
            plgpu.SMEM((stages, columns, dim), keys.dtype, transforms=tiled(plgpu)),
            plgpu.SMEM((steps if bias is not None else 1, columns), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows,), jnp.int32),
            plgpu.Barrier(num_arrivals=len(inputs) - 1),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(),
        ],
    )(*inputs)
    return Nearest(score.reshape(*batch, count), place.reshape(*batch, count))


def _sizes(queries: Array, keys: Array) -> dict[str, int]:
    """Return measured sizes, which `wgmma` marks, or the default sizes."""
    *batch, count, dim = queries.shape
    size, dtype = keys.shape[-2], queries.dtype.name
    case = {"groups": math.prod(batch), "queries": count, "keys": size, "head_dim": dim, "dtype": dtype}
    sizes = tuned("nearest", case, SIZES)
    return sizes if "wgmma" in sizes else dict(SIZES)
