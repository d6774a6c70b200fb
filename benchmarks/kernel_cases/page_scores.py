"""Benchmark cases of `page_scores`, upper bounds of a query's products with the keys of each page (Quest).

At Llama-3.1-8B's shape.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import page_scores
from kvjax.pallas_kernels.block_scores import pallas_triton

from .case import Case, relative_error

SHAPES = tuple(product((1, 8), (1048, 4120)))
"""Sequences, pages: contexts of 16k and 64k, with room for generated tokens."""

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
"""Query heads, KV heads, head dim, tokens per page."""


def cases() -> Iterator[Case]:
    """Normal queries, and bounds around normal keys. The last page is empty."""
    for batch, pages in SHAPES:
        yield Case(
            operation="page_scores",
            shape=f"{pages} pages, B{batch} N{HEADS} K{KV_HEADS} H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, batch, pages),
            variants={
                "xla": partial(page_scores, page=PAGE, implementation="xla"),
                "auto": partial(page_scores, page=PAGE),
                **{
                    f"gpu pages={block} warps={warps}": partial(
                        pallas_triton.page_scores, page=PAGE, sizes={"pages": block, "warps": warps}
                    )
                    for block, warps in product((16, 32, 64, 128), (1, 2, 4, 8))
                },
            },
            error=_error,
            tolerance=1e-5,
            bytes=batch * (KV_HEADS * pages * 2 * DIM * 2 + HEADS * (4 * pages + 2 * DIM)),
            flops=2 * batch * HEADS * pages * 2 * DIM,
        )


def _inputs(batch: int, pages: int, seed: int) -> tuple[jax.Array, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 3))
    q = jax.random.normal(next(keys), (batch, HEADS, DIM), jnp.bfloat16)
    middle, half = (jax.random.normal(next(keys), (batch, KV_HEADS, pages, DIM)) for _ in range(2))
    bounds = jnp.concatenate([middle - jnp.abs(half), middle + jnp.abs(half)], axis=-1).astype(jnp.bfloat16)
    return q, bounds, jnp.full((batch,), (pages - 1) * PAGE, jnp.int32)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the last sequence; infinite if the empty page has a score."""
    q, bounds = (np.asarray(x, np.float64)[-1] for x in inputs[:2])
    low, high = np.split(np.repeat(bounds, HEADS // KV_HEADS, axis=0), 2, axis=-1)
    best = np.maximum(q[:, None] * low, q[:, None] * high).sum(axis=-1)
    got = np.asarray(out)[-1]
    return relative_error(got[:, :-1], best[:, :-1]) if (got[:, -1] == -np.inf).all() else float("inf")
