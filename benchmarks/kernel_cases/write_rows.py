"""Benchmark cases of `write_rows`: rows of a batch that were compressed are written back.

A group of 32 rows of Llama-3.1-8B's shape, into a batch of 256 rows with a budget of 1,024 and 128 tokens more.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import write_rows

from .case import Case

ROW = 8, 1152, 128
"""KV heads, slots, head dim."""


def cases() -> Iterator[Case]:
    """Groups with rows that do not exist."""
    for batch, group in ((256, 32), (64, 8)):
        yield Case(
            operation="write_rows",
            shape=f"{group} of B{batch} K{ROW[0]} C{ROW[1]} H{ROW[2]}",
            dtype="bfloat16",
            inputs=partial(_inputs, batch, group),
            variants={name: partial(write_rows, implementation=name) for name in ("xla", "auto")},
            error=_error,
            tolerance=0.0,
            bytes=2 * 2 * group * int(np.prod(ROW)),
            flops=0,
        )


def _inputs(batch: int, group: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    array, values = (
        jax.random.normal(key, (n, *ROW), jnp.bfloat16) for key, n in zip(keys, (batch, group), strict=False)
    )
    rows = jax.random.permutation(keys[2], batch)[:group].astype(jnp.int32).at[1].set(batch)
    return array, rows, values


def _error(inputs: tuple[Any, ...], out: jax.Array) -> float:
    """Share of rows that differ from what they must be."""
    array, rows, values = inputs
    expected = np.asarray(array).copy()
    for at, value in zip(np.asarray(rows), np.asarray(values), strict=True):
        if at < len(expected):
            expected[at] = value
    return float(np.mean(np.any((np.asarray(out) != expected).reshape(len(expected), -1), axis=1)))
