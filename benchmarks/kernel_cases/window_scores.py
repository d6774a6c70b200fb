"""Benchmark cases of `window_scores`: attention of a prompt's last queries to each token or chunk (SnapKV, CateKV, …).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.case import Case, relative_error
from kvjax.pallas_kernels import window_scores
from kvjax.pallas_kernels.window_scores import window_scores_pallas_triton
from kvjax.pallas_kernels.window_scores.types import Observers

SAMPLED = 2
"""Number of heads (sequence × KV head) compared with float64."""


def cases() -> Iterator[Case]:
    """Windows as in SnapKV and ChunkKV, and chunks as in CateKV."""
    yield _case(1, 32768, 32)
    yield _case(8, 8192, 32)
    yield _case(8, 8192, 64, chunk=8)
    yield _case(8, 8192, 16, dim=64)


def _case(
    batch: int, length: int, window: int, *, kv_heads: int = 8, group: int = 4, dim: int = 128, chunk: int = 1
) -> Case:
    heads, scale = kv_heads * group, dim**-0.5

    def inputs(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 2)
        q = jax.random.normal(keys[0], (batch, length, heads, dim), jnp.bfloat16)
        k = jax.random.normal(keys[1], (batch, length, kv_heads, dim), jnp.bfloat16)
        return q, k, jnp.full((batch,), length, jnp.int32)

    def error(inputs: tuple[Any, ...], out: Any) -> float:
        q, k, _ = inputs
        worst = 0.0
        for row, head in np.random.default_rng(0).integers(0, (batch, kv_heads), (SAMPLED, 2)):
            queries = np.asarray(q[row, -window:, head * group : (head + 1) * group], np.float64)
            logits = np.einsum("wgh,th->wgt", queries, np.asarray(k[row, :, head], np.float64)) * scale
            causal = np.arange(length) <= np.arange(length - window, length)[:, None, None]
            weights = np.exp(np.where(causal, logits, -np.inf) - logits.max(axis=-1, keepdims=True))
            given = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1).reshape(window, -1, chunk)
            worst = max(worst, relative_error(out[row, head], given.max(axis=-1).mean(axis=0)))
        return worst

    call = functools.partial(window_scores, window=window, scale=scale, chunk=chunk)
    variants = {"xla": functools.partial(call, implementation="xla"), "auto": call}
    for tile in (64, 128, 256):
        for block in (32, 64, 128):
            for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3)):
                splits = max(1, 512 // (batch * kv_heads * max(1, window * group // tile)))
                sizes = {"rows": tile, "block": block, "splits": splits, "warps": warps, "stages": stages}
                if tile <= window * group and tile * block <= 128 * 128:
                    name = f"gpu rows={tile} block={block} splits={splits} warps={warps} stages={stages}"
                    variants[name] = functools.partial(_sized, window, scale, chunk, sizes)
    return Case(
        operation="window_scores",
        shape=f"B{batch} T{length} N{heads} K{kv_heads} H{dim}, window {window}, chunks of {chunk}",
        dtype="bfloat16",
        inputs=inputs,
        variants=variants,
        error=error,
        tolerance=1e-2,
        bytes=batch * kv_heads * (length * dim * 2 + length // chunk * 4) + batch * window * heads * dim * 2,
        flops=2 * batch * heads * window * length * dim,
    )


def _sized(
    window: int, scale: float, chunk: int, sizes: dict[str, int], q: jax.Array, k: jax.Array, lengths: jax.Array
) -> jax.Array:
    observers = Observers.of(q, lengths, window, k.shape[2])
    none = jnp.zeros_like(lengths)
    total = window_scores_pallas_triton.window_scores(
        observers, k, none, lengths, scale=scale, sliding_window=None, chunk=chunk, sizes=sizes
    )
    return total / window
