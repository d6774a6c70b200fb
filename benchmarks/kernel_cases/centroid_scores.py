"""Benchmark cases of `centroid_scores`, the products of queries with all cluster centroids (ClusterKV).

There is one cluster per 80 tokens.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import centroid_scores
from kvjax.pallas_kernels.block_scores import pallas_triton

from .case import Case, relative_error

HEADS, GROUP, DIM = 8, 4, 128
"""KV heads, queries per KV head, head dim."""


def cases() -> Iterator[Case]:
    """Normal queries and centroids."""
    for batch, tokens in product((1, 8), (16384, 32768, 65536)):
        clusters = tokens // 80
        yield Case(
            operation="centroid_scores",
            shape=f"{clusters} centroids, B{batch} K{HEADS} G{GROUP} H{DIM}",
            dtype="float32",
            inputs=partial(_inputs, batch, clusters),
            variants={
                "xla": partial(centroid_scores, implementation="xla"),
                "auto": centroid_scores,
                **{
                    f"gpu centroids={count} warps={warps}": partial(
                        pallas_triton.centroid_scores, sizes={"centroids": count, "warps": warps}
                    )
                    for count, warps in product((8, 16, 32, 64), (1, 2, 4, 8))
                },
            },
            error=_error,
            tolerance=1e-6,
            bytes=4 * batch * HEADS * clusters * (DIM + GROUP),
            flops=0,
        )


def _inputs(batch: int, clusters: int, seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    q = jax.random.normal(keys[0], (batch, HEADS * GROUP, DIM), jnp.bfloat16)
    return q, jax.random.normal(keys[1], (batch, HEADS, clusters, DIM))


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    q, centroids = (np.asarray(x, np.float64) for x in inputs)
    expected = np.einsum("bkgh,bkmh->bkgm", q.reshape(len(q), HEADS, GROUP, DIM), centroids)
    return relative_error(out, expected)
