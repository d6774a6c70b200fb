"""Benchmark cases of `delta_rule`, which prefills gated delta nets.

At Qwen3.5-9B's shape: one prompt, and blocks of several rows.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import delta_rule
from kvjax.pallas_kernels.delta_rule import pallas_triton

from .case import Case, relative_error

KEY_HEADS, HEADS, DIM = 16, 32, 128

SHAPES = ((1, 16384), (8, 2048), (1, 100))
"""Sequences, tokens."""

SIZES = [
    {"columns": columns, "solver_warps": solver, "warps": warps, "stages": stages}
    for columns in (16, 32, 64)
    for solver in (4, 8)
    for warps in (4, 8)
    for stages in (1, 2, 3)
]


def cases() -> Iterator[Case]:
    """Unit keys that resemble one another, and decays of 0.9 on average."""
    for rows, size in SHAPES:
        sized = {
            "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): sizes
            for sizes in (SIZES if size > 1000 else ())
        }
        chunks = -(-size // pallas_triton.CHUNK)
        yield Case(
            operation="delta_rule",
            shape=f"B{rows} S{size} G{KEY_HEADS} M{HEADS} X{DIM} Y{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, size),
            variants={
                **{name: partial(delta_rule, implementation=name) for name in ("xla", "auto")},
                **{name: partial(pallas_triton.delta_rule, sizes=sizes) for name, sizes in sized.items()},
            },
            error=_error,
            tolerance=1e-2,
            bytes=rows * (size * (8 * KEY_HEADS * DIM + 4 * HEADS * DIM + 8 * HEADS) + 8 * HEADS * DIM * DIM),
            flops=2 * rows * HEADS * chunks * pallas_triton.CHUNK * DIM * (5 * pallas_triton.CHUNK + 3 * DIM),
            sizes=sized,
            tuned_by=("delta_rule", {"rows": rows, "heads": HEADS, "key_dim": DIM, "value_dim": DIM}),
        )


def _inputs(rows: int, size: int, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k = (jax.random.normal(key, (rows, size, KEY_HEADS, DIM)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k + 0.5))
    v = jax.random.normal(keys[2], (rows, size, HEADS, DIM), jnp.bfloat16)
    log_decay = -0.1 * jax.random.exponential(keys[3], (rows, size, HEADS))
    rate = jax.random.uniform(keys[4], (rows, size, HEADS))
    return q * DIM**-0.5, k, v, log_decay, rate, 0.3 * jax.random.normal(keys[5], (rows, HEADS, DIM, DIM))


def _error(inputs: tuple[Any, ...], out: tuple[jax.Array, jax.Array]) -> float:
    """Of the last row's last head, beside the recurrence in float64."""
    q, k = (np.asarray(x[-1, :, -1], np.float64) for x in inputs[:2])
    v, log_decay, rate = (np.asarray(x[-1, :, -1].astype(jnp.float32), np.float64) for x in inputs[2:5])
    memory, expected = np.asarray(inputs[5][-1, -1], np.float64), np.zeros(v.shape)
    for t in range(len(q)):
        memory = memory * np.exp(log_decay[t])
        memory = memory + np.outer(k[t], rate[t] * (v[t] - k[t] @ memory))
        expected[t] = q[t] @ memory
    errors = relative_error(out[0][-1, :, -1].astype(jnp.float32), expected), relative_error(out[1][-1, -1], memory)
    return max(errors)
