"""Benchmark cases of `top_k` (a mask) and `top_k_indices`: the highest scores of each row (most policies, Quest).

The variant "lax.top_k" is JAX's own.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import top_k, top_k_indices
from kvjax.pallas_kernels.ties import NEAR
from kvjax.pallas_kernels.top_k import top_k_pallas_triton as pallas_triton

from .case import Case

SHAPES = ((256, 32768, 1024), (256, 8192, 1024), (1024, 2048, 512))
"""Rows, scores per row, and number chosen."""

PAGES = ((32, 1048, 64), (256, 1048, 64), (32, 4192, 64), (256, 4192, 64))
"""The same for Quest: pages of 16 tokens, a budget of 1024 tokens, contexts of 16k and 64k."""


def cases() -> Iterator[Case]:
    """Normal scores, with the same number chosen in each row."""
    yield from _masks()
    for rows, size, count in PAGES:
        yield Case(
            operation="top_k_indices",
            shape=f"{count} of {rows} rows of {size}",
            dtype="float32",
            inputs=partial(_inputs, rows, size, count),
            variants={
                "xla": partial(top_k_indices, size=count, implementation="xla"),
                "auto": partial(top_k_indices, size=count),
                **{
                    f"gpu warps={warps}": partial(pallas_triton.top_k_indices, size=count, warps=warps)
                    for warps in (1, 2, 4, 8)
                },
            },
            error=lambda inputs, out: _error(inputs, out[0]),
            tolerance=0.0,
            bytes=rows * (4 * size + 5 * count),
            flops=0,
        )


def _masks() -> Iterator[Case]:
    for rows, size, count in SHAPES:
        yield Case(
            operation="top_k",
            shape=f"{rows} rows of {size}, k={count}",
            dtype="float32",
            inputs=partial(_inputs, rows, size, count),
            variants={
                "lax.top_k": lambda scores, counts, count=count: jax.lax.top_k(scores, count)[1],
                "xla": partial(top_k, implementation="xla"),
                "auto": top_k,
                **{f"gpu warps={warps}": partial(pallas_triton.top_k, warps=warps) for warps in (4, 8, 16, 32)},
            },
            error=_error,
            tolerance=0.0,
            bytes=rows * size * (4 + 1),
            flops=0,
        )


def _inputs(rows: int, size: int, count: int, seed: int) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(seed), (rows, size)), jnp.full((rows,), count, jnp.int32)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Share of wrong entries of a mask, or of the mask that indices give.

    Of scores that count as equal to the k-th, the first must be chosen.
    """
    scores, counts = (np.asarray(x) for x in inputs)
    bits = scores.view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    kth = np.sort(keys, axis=-1)[:, -counts[0], None]
    above, equal = keys > kth + NEAR, np.abs(keys - kth) <= NEAR
    expected = above | (equal & (np.cumsum(equal, axis=-1) <= counts[:, None] - above.sum(axis=-1, keepdims=True)))
    chosen = np.asarray(out)
    if chosen.dtype != bool:
        indices, chosen = chosen, np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, indices, True, axis=-1)
    return float(np.mean(chosen != expected))
