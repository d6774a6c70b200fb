"""Benchmark cases of `prefill_attention`, causal attention over a whole prompt (every model).

At the shapes of Llama-3.1-8B, SmolLM2-135M, Qwen3.5-9B and Gemma 3 4B.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from kvjax.pallas_kernels import prefill_attention

from .case import Case, relative_error

SHAPES = (
    (1, 8192, 32, 8, 128, None),
    (2, 4096, 32, 8, 128, 1024),
    (1, 8192, 9, 3, 64, None),
    (1, 8192, 16, 4, 256, None),
    (2, 4096, 8, 4, 256, 1024),
)
"""Sequences, tokens, query heads, KV heads, head dim, sliding window."""

WITH_SINKS = ((2, 4096, 64, 8, 64, None),)
"""The same, with attention sinks (gpt-oss-20b)."""

SAMPLED = 2
"""Number of heads compared with float64, each for some of its queries."""


def cases() -> Iterator[Case]:
    """Normal queries, keys and values."""
    for rows, tokens, heads, kv_heads, dim, window in SHAPES + WITH_SINKS:
        seen = window or tokens
        pairs = rows * heads * (seen * (tokens - seen) + seen * (seen + 1) // 2)
        sinks = (rows, tokens, heads, kv_heads, dim, window) in WITH_SINKS
        attend = partial(_attend, scale=dim**-0.5, window=window)
        yield Case(
            operation="prefill_attention",
            shape=f"B{rows} T{tokens} N{heads} K{kv_heads} H{dim}"
            + f", window {window}" * (window is not None)
            + ", sinks" * sinks,
            dtype="bfloat16",
            inputs=partial(_inputs, rows, tokens, heads, kv_heads, dim, sinks),
            variants={"xla": partial(attend, implementation="xla"), "auto": attend},
            error=partial(_error, window),
            tolerance=1e-2,
            bytes=4 * rows * tokens * (heads + kv_heads) * dim,
            flops=4 * pairs * dim,
        )


def _attend(q: Any, k: Any, v: Any, sinks: Any = None, **options: Any) -> Any:
    return prefill_attention(q, k, v, sinks=sinks, **options)


def _inputs(
    rows: int, tokens: int, heads: int, kv_heads: int, dim: int, sinks: bool, seed: int
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    heads_of = zip(keys, (heads, kv_heads, kv_heads), strict=False)
    qkv = tuple(jax.random.normal(key, (rows, tokens, count, dim), "bfloat16") for key, count in heads_of)
    return (*qkv, 5 * jax.random.normal(keys[3], (heads,), "bfloat16")) if sinks else qkv


def _error(window: int | None, inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the first, the last and some random queries of a few heads."""
    q, k, v, *sinks = inputs
    _, tokens, heads, dim = q.shape
    random, group = np.random.default_rng(0), heads // k.shape[2]
    got, expected = [], []
    for head in random.choice(heads, SAMPLED, replace=False):
        row = int(random.integers(q.shape[0]))
        keys, values = (np.asarray(x[row, :, head // group], np.float64) for x in (k, v))
        for at in (0, tokens - 1, *random.integers(0, tokens, 30)):
            first = 0 if window is None else max(0, at + 1 - window)
            logits = keys[first : at + 1] @ np.asarray(q[row, at, head], np.float64) * dim**-0.5
            sink = float(sinks[0][head]) if sinks else -np.inf
            share = np.exp(logits - max(logits.max(), sink))
            total = share.sum() + np.exp(sink - max(logits.max(), sink))
            expected.append(share / total @ values[first : at + 1])
            got.append(np.asarray(out[row, at, head], np.float64))
    return relative_error(np.stack(got), np.stack(expected))
