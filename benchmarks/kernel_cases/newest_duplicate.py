"""Benchmark cases of `newest_duplicate`, which finds each key's newest near duplicate (R-KV).

At Llama-3.1-8B's shape: in a decoding round (a budget of 2048, plus 128 new tokens), in one of 32 rows with a budget of 1024, and
in a prompt.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import newest_duplicate
from kvjax.pallas_kernels.kmeans import newest_duplicate_pallas_triton as pallas_triton

from .case import Case

SHAPES = ((1, 2176, 128), (8, 2176, 128), (32, 1152, 128), (1, 16384, 128))
"""Sequences, keys, head dim."""

DTYPE = "bfloat16"

HEADS = 8

THRESHOLD = 0.5

NEAR = 1e-3
"""Distance of a cosine to the threshold within which rounding may decide."""


def cases() -> Iterator[Case]:
    """Keys near some directions, so that many have duplicates."""
    for rows, count, dim in SHAPES:
        yield Case(
            operation="newest_duplicate",
            shape=f"B{rows} K{HEADS} T{count} H{dim}",
            dtype=DTYPE,
            inputs=partial(_inputs, rows, count, dim),
            variants={
                "xla": partial(newest_duplicate, threshold=THRESHOLD, implementation="xla"),
                "auto": partial(newest_duplicate, threshold=THRESHOLD),
                **{
                    "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): partial(
                        pallas_triton.newest_duplicate, threshold=THRESHOLD, sizes=sizes
                    )
                    for sizes in _sizes()
                },
            },
            error=_error,
            tolerance=0.0,
            bytes=rows * HEADS * count * (jnp.dtype(DTYPE).itemsize * dim + 4),
            flops=2 * rows * HEADS * count**2 * dim,
        )


def _sizes() -> Iterator[dict[str, int]]:
    for rows, columns, warps, stages in product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
        if rows <= columns and rows * columns <= 8192 * (warps // 4):
            yield {"rows": rows, "columns": columns, "warps": warps, "stages": stages}


def _inputs(rows: int, count: int, dim: int, seed: int) -> tuple[jax.Array, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    directions = jax.random.normal(next(keys), (count // 4, dim))
    which = jax.random.randint(next(keys), (rows, HEADS, count), 0, len(directions))
    drawn = directions[which] + 0.7 * jax.random.normal(next(keys), (rows, HEADS, count, dim))
    live = jax.random.bernoulli(next(keys), 0.95, which.shape)
    return jnp.where(live[..., None], drawn, 0).astype(DTYPE), live


def _error(inputs: tuple[Any, ...], out: jax.Array) -> float:
    """Share of the first head's keys with another duplicate than in float64, unless rounding decides."""
    keys, live = (np.asarray(x[0, 0]) for x in inputs)
    keys, wrong = keys.astype(np.float64), 0
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-300)
    for own in np.array_split(np.arange(len(keys)), -(-len(keys) // 2048)):
        cosines = np.where(live, unit[own] @ unit.T, -np.inf)
        cosines[np.arange(len(own)), own] = -np.inf
        at_least, at_most = (
            np.where((above := cosines > bound).any(1), len(keys) - 1 - above[:, ::-1].argmax(1), -1)
            for bound in (THRESHOLD + NEAR, THRESHOLD - NEAR)
        )
        found = np.asarray(out[0, 0])[own]
        wrong += int((live[own] & ((found < at_least) | (found > at_most))).sum())
    return wrong / len(keys)
