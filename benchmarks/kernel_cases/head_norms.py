"""Benchmark cases of `head_norms`, the norms of query and key heads (Qwen3, Gemma 3).

At Qwen3-30B-A3B's shape: steps of one row and of 64.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Norm, head_norms

from .case import Case, relative_error

HEADS, KV_HEADS, DIM, EPS = 32, 4, 128, 1e-6


def cases() -> Iterator[Case]:
    """Normal heads and gains around 1."""
    for rows in (1, 64):
        yield Case(
            operation="head_norms",
            shape=f"B{rows} N{HEADS} K{KV_HEADS} H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows),
            variants={name: partial(_normed, name) for name in ("xla", "auto")},
            error=_error,
            tolerance=1e-2,
            bytes=4 * rows * (HEADS + KV_HEADS) * DIM + 4 * DIM,
            flops=0,
        )


def _normed(implementation: Any, q: jax.Array, k: jax.Array, q_gain: jax.Array, k_gain: jax.Array) -> Any:
    return head_norms(q, k, Norm(q_gain, EPS), Norm(k_gain, EPS), implementation=implementation)


def _inputs(rows: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k = (
        jax.random.normal(key, (rows, count, DIM), jnp.bfloat16)
        for key, count in zip(keys[:2], (HEADS, KV_HEADS), strict=True)
    )
    q_gain, k_gain = (1 + 0.1 * jax.random.normal(key, (DIM,), jnp.bfloat16) for key in keys[2:])
    return q, k, q_gain, k_gain


def _error(inputs: tuple[Any, ...], out: tuple[jax.Array, jax.Array]) -> float:
    """The larger error of both, beside float64."""
    errors = []
    for x, gain, normed in zip(inputs[:2], inputs[2:], out, strict=True):
        x, gain = (np.asarray(each.astype(jnp.float32), np.float64) for each in (x, gain))
        expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * gain
        errors.append(relative_error(normed.astype(jnp.float32), expected))
    return max(errors)
