"""k-means as ClusterKV runs it over a prompt's keys, 20 iterations."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import kmeans

from .case import Case

SHAPES = ((8, 8, 8192, 256, 128), (8, 8, 8192, 102, 64), (1, 8, 32768, 410, 128), (1, 8, 65536, 820, 128))
"""Rows, KV heads, tokens, clusters, head dim. A cluster to 80 tokens is ClusterKV's default."""

ITERATIONS = 20


def cases() -> Iterator[Case]:
    """Normal tokens, the first of them as centroids."""
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
            error=_error,
            tolerance=1e-3,
            bytes=(ITERATIONS + 1) * groups * tokens * dim * size + groups * (8 * clusters * dim + 4 * tokens),
            flops=(ITERATIONS + 1) * 2 * groups * tokens * clusters * dim,
        )


def _inputs(
    batch: int, heads: int, tokens: int, clusters: int, dim: int, dtype: str, seed: int
) -> tuple[jax.Array, ...]:
    x = jax.random.normal(jax.random.key(seed), (batch, heads, tokens, dim), jnp.dtype(dtype))
    return x, jnp.ones((batch, tokens), bool), x[:, :, :clusters], jnp.full((batch,), clusters, jnp.int32)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Of the first head, the larger of two: how much less than the nearest a token's own centroid is like it, and how far nine in ten
    centroids are from those of as many iterations in float64.

    A token between two centroids falls to either by the rounding of float32, and so moves both. Some do, of a million comparisons.
    """
    dtype, x = inputs[0].dtype, np.asarray(inputs[0][0, 0], np.float64)
    centroids = np.asarray(inputs[2][0, 0], np.float64)
    for _ in range(ITERATIONS):
        labels = _likeness(x, centroids, dtype).argmax(axis=-1)
        for cluster in np.unique(labels):
            centroids[cluster] = x[labels == cluster].mean(axis=0)
    found, own = (np.asarray(part[0, 0]) for part in out)
    likeness = _likeness(x, found.astype(np.float64), dtype)
    mine = np.take_along_axis(likeness, own[:, None], axis=-1)[:, 0]
    short = float(np.max(likeness.max(axis=-1) - mine) / np.abs(likeness).max())
    apart = np.abs(found - centroids).max(axis=-1) / np.abs(centroids).max()
    return max(short, float(np.quantile(apart, 0.9)))


def _likeness(x: np.ndarray, centroids: np.ndarray, dtype: Any) -> np.ndarray:
    """Products of tokens [N, H] and directions of centroids, which are rounded to the tokens' type: [N, C]."""
    direction = (centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)).astype(np.float32).astype(dtype)
    return x @ direction.astype(np.float64).T
