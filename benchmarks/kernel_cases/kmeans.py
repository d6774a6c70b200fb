"""k-means as ClusterKV runs it over a prompt's keys, 20 iterations."""

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
"""Rows, KV heads, tokens, clusters, head dim. A cluster to 80 tokens is ClusterKV's default."""

ITERATIONS = 20

EXACT = 32768
"""Tokens of which all clusters come out as in float64; see `_worse`."""


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
    """Of the first head's centroids, after as many iterations in float64."""
    x, dtype = np.asarray(inputs[0][0, 0], np.float64), inputs[0].dtype
    return relative_error(out[0][0, 0], _iterated(x, inputs, dtype)[0])


def _worse(inputs: tuple[Any, ...], out: Any) -> float:
    """Of the first head, the larger of two: by how much another centroid is nearer to a token than its own, and by how much the
    tokens' mean likeness to their centroids differs from what float64 comes to.

    A token between two centroids falls to either by the rounding of float32, and what that moves moves others: of 65536 tokens 9 %
    end in another cluster when XLA computes on a CPU, and the mean likeness differs by 1.6e-4.
    """
    x, dtype = np.asarray(inputs[0][0, 0], np.float64), inputs[0].dtype
    _, reached = _iterated(x, inputs, dtype)
    centroids, own = (np.asarray(part[0, 0]) for part in out)
    likeness = _likeness(x, centroids.astype(np.float64), dtype)
    mine = np.take_along_axis(likeness, own[:, None], axis=-1)[:, 0]
    short = np.max(likeness.max(axis=-1) - mine) / np.abs(likeness).max()
    return max(float(short), float(abs(mine.mean() / reached - 1)))


def _iterated(x: np.ndarray, inputs: tuple[Any, ...], dtype: Any) -> tuple[np.ndarray, float]:
    """The centroids in float64, and the tokens' mean likeness to theirs."""
    centroids = np.asarray(inputs[2][0, 0], np.float64)
    for _ in range(ITERATIONS):
        labels = _likeness(x, centroids, dtype).argmax(axis=-1)
        for cluster in np.unique(labels):
            centroids[cluster] = x[labels == cluster].mean(axis=0)
    return centroids, float(_likeness(x, centroids, dtype).max(axis=-1).mean())


def _likeness(x: np.ndarray, centroids: np.ndarray, dtype: Any) -> np.ndarray:
    """Products of tokens [N, H] and directions of centroids, which are rounded to the tokens' type: [N, C]."""
    direction = (centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)).astype(np.float32).astype(dtype)
    return x @ direction.astype(np.float64).T
