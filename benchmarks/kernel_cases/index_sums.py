"""Benchmark cases of `index_sums`, which adds up what keys are spared for their duplicates (R-KV).

At Llama-3.1-8B's shape, in decoding rounds: 32 rows with a budget of 1,024, plus 128 new tokens, and 8 with 2,048.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import index_sums

from .case import Case

HEADS = 8

SHAPES = ((32, 1152), (8, 2176))
"""Sequences, values."""


def cases() -> Iterator[Case]:
    """Random indices. Some are negative."""
    for rows, count in SHAPES:
        yield Case(
            operation="index_sums",
            shape=f"B{rows} K{HEADS} T{count}",
            dtype="float32",
            inputs=partial(_inputs, rows, count),
            variants={name: partial(index_sums, implementation=name) for name in ("xla", "auto")},
            error=_error,
            tolerance=1e-5,
            bytes=12 * rows * HEADS * count,
            flops=0,
        )


def _inputs(rows: int, count: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = rows, HEADS, count
    return jax.random.randint(keys[0], shape, -1, count, jnp.int32), jax.random.normal(keys[1], shape)


def _error(inputs: tuple[Any, ...], out: jax.Array) -> float:
    """Of the first head, beside float64."""
    index, values = (np.asarray(x[0, 0]) for x in inputs)
    there = index >= 0
    expected = np.bincount(index[there], np.asarray(values[there], np.float64), minlength=len(values))
    return float(np.linalg.norm(np.asarray(out[0, 0]) - expected) / np.linalg.norm(expected))
