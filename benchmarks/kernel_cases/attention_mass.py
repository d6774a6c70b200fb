"""Benchmark cases of `attention_mass`: the attention that each token receives from all queries (H2O, CaM).

The queries are those of a whole prompt, or of a block of it after cached tokens.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import attention_mass

from .case import Case, relative_error

SHAPES = ((1, 4096, 4096, 32, 8, 128), (1, 4096, 16384, 32, 8, 128), (1, 8192, 0, 32, 8, 128), (2, 700, 1000, 8, 2, 64))
"""Sequences, queries, cached tokens before them, query heads, KV heads, head dim."""

SAMPLED = 2
"""Number of heads (sequence x KV head) compared with float64."""


def cases() -> Iterator[Case]:
    """Normal queries and keys. The first half of the heads has fewer tokens, and later sequences are shorter."""
    for rows, queries, before, heads, kv_heads, dim in SHAPES:
        mass = partial(_mass, scale=dim**-0.5)
        pairs = rows * queries * (before + queries / 2)
        yield Case(
            operation="attention_mass",
            shape=f"B{rows} S{queries} C{before} N{heads} K{kv_heads} H{dim}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, queries, before, heads, kv_heads, dim),
            variants={"xla": partial(mass, implementation="xla"), "auto": mass},
            error=_error,
            tolerance=1e-2,
            bytes=2 * rows * (queries * heads + (before + queries) * kv_heads) * dim,
            flops=int(4 * pairs * heads * dim),  # logits twice
        )


def _inputs(
    rows: int, queries: int, before: int, heads: int, kv_heads: int, dim: int, seed: int
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 2)
    q = jax.random.normal(keys[0], (rows, queries, heads, dim), "bfloat16")
    k = jax.random.normal(keys[1], (rows, before + queries, kv_heads, dim), "bfloat16")
    lengths = before + queries - jnp.arange(rows, dtype=jnp.int32) * (queries // 5)
    place = jnp.arange(before + queries, dtype=jnp.int32)
    free = jnp.where(jnp.arange(kv_heads) < kv_heads // 2, before // 10 + 3 * jnp.arange(kv_heads), 0)
    free = jnp.minimum(free, before)
    live = (place >= free[:, None]) & (place < lengths[:, None, None])
    return q, k, lengths, jnp.where(live, place, -1)


def _mass(q: Any, k: Any, lengths: Any, pos: Any, *, scale: float, implementation: Any = "auto") -> Any:
    told = pos if k.shape[1] > q.shape[1] else None
    return attention_mass(q, k, lengths, scale=scale, pos=told, implementation=implementation)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    q, k, lengths, pos = (np.asarray(x) for x in inputs)
    before, group, worst = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2], 0.0
    for row, head in np.random.default_rng(0).integers(0, (k.shape[0], k.shape[2]), (SAMPLED, 2)):
        there = int(lengths[row]) - before
        held = pos[row, head] >= 0
        keys = k[row, :, head].astype(np.float64)
        visible = held & (np.arange(k.shape[1]) <= before + np.arange(there)[:, None])
        total = np.zeros(k.shape[1])
        for member in range(head * group, (head + 1) * group):
            logits = q[row, :there, member].astype(np.float64) @ keys.T * q.shape[-1] ** -0.5
            weights = np.where(visible, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
            total += (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=0)
        worst = max(worst, relative_error(out[row, head], total / group))
    return worst
