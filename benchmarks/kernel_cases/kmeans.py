"""Benchmark cases of `kmeans`, which clusters the keys of each head (ClusterKV, 20 iterations).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import kmeans

from .case import Case, relative_error

SHAPES = ((8, 8, 8192, 256, 128), (8, 8, 8192, 102, 64), (1, 8, 32768, 410, 128), (1, 8, 65536, 820, 128))
"""Sequences, KV heads, tokens, clusters, head dim. ClusterKV's default is one cluster per 80 tokens."""

ITERATIONS = 20

EXACT = 32768
"""Maximum number of tokens for which the centroids must equal float64's. For more, see `_worse`."""


def cases() -> Iterator[Case]:
    """Normal tokens. The first ones are the initial centroids."""
    for (batch, heads, tokens, clusters, dim), dtype in product(SHAPES, ("bfloat16", "float32")):
        groups, size = batch * heads, jnp.dtype(dtype).itemsize
        shape = f"B{batch} K{heads}, {tokens} tokens, {clusters} clusters, H{dim}"
        yield Case(
            operation="kmeans",
            shape=f"{shape}, {ITERATIONS} iterations",
            dtype=dtype,
            inputs=partial(_inputs, batch, heads, tokens, clusters, dim, dtype),
            variants={
                "xla": partial(kmeans, iterations=ITERATIONS, implementation="xla"),
                "auto": partial(kmeans, iterations=ITERATIONS),
            },
            error=_apart if tokens <= EXACT else _worse,
            tolerance=1e-3,
            bytes=(ITERATIONS + 1) * groups * tokens * dim * size + groups * (8 * clusters * dim + 4 * tokens),
            flops=(ITERATIONS + 1) * 2 * groups * tokens * clusters * dim,
        )


def _inputs(
    batch: int, heads: int, tokens: int, clusters: int, dim: int, dtype: str, seed: int
) -> tuple[jax.Array, ...]:
    x = jax.random.normal(jax.random.key(seed), (batch, heads, tokens, dim), jnp.dtype(dtype))
    return x, jnp.ones((batch, tokens), bool), x[:, :, :clusters], jnp.full((batch,), clusters, jnp.int32)


def _apart(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the first head's centroids to those after the same iterations in float64."""
    x, dtype = np.asarray(inputs[0][0, 0], np.float64), inputs[0].dtype
    return relative_error(out[0][0, 0], _iterated(x, inputs, dtype)[0])


def _worse(inputs: tuple[Any, ...], out: Any) -> float:
    """Larger of two errors of the first head: how much nearer another centroid is to a token than its own, and how much
    the mean similarity of tokens to their centroids differs from float64's.

    Rounding decides the cluster of a token between two centroids, which moves other tokens too. With XLA on a CPU, 9 %
    of 65536 tokens end in another cluster than in float64, and the mean similarity differs by 1.6e-4.
    """
    x, dtype = np.asarray(inputs[0][0, 0], np.float64), inputs[0].dtype
    _, reached = _iterated(x, inputs, dtype)
    centroids, own = (np.asarray(part[0, 0]) for part in out)
    similarity = _similarity(x, centroids.astype(np.float64), dtype)
    mine = np.take_along_axis(similarity, own[:, None], axis=-1)[:, 0]
    short = np.max(similarity.max(axis=-1) - mine) / np.abs(similarity).max()
    return max(float(short), float(abs(mine.mean() / reached - 1)))


def _iterated(x: np.ndarray, inputs: tuple[Any, ...], dtype: Any) -> tuple[np.ndarray, float]:
    """Centroids in float64, and the mean similarity of tokens to theirs."""
    centroids = np.asarray(inputs[2][0, 0], np.float64)
    for _ in range(ITERATIONS):
        labels = _similarity(x, centroids, dtype).argmax(axis=-1)
        for cluster in np.unique(labels):
            centroids[cluster] = x[labels == cluster].mean(axis=0)
    return centroids, float(_similarity(x, centroids, dtype).max(axis=-1).mean())


def _similarity(x: np.ndarray, centroids: np.ndarray, dtype: Any) -> np.ndarray:
    """Products [N, C] of tokens [N, H] with the centroids' directions, which are rounded to the tokens' dtype."""
    direction = (centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)).astype(np.float32).astype(dtype)
    return x @ direction.astype(np.float64).T
