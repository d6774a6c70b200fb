"""k-means as ClusterKV runs it over a prompt's keys, 20 iterations, and the sums over clusters of one of them."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import kmeans
from kvjax.pallas_kernels.kmeans import gpu

from .case import Case, relative_error

SHAPES = ((8, 8, 8192, 256, 128), (8, 8, 8192, 102, 64), (1, 8, 32768, 410, 128))
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
        yield Case(
            operation="cluster_sums",
            shape=shape,
            dtype=dtype,
            inputs=partial(_labelled, batch, heads, tokens, clusters, dim, dtype),
            variants={
                "segment_sum": partial(_segment_sums, clusters),
                "gpu": partial(gpu.cluster_sums, size=clusters),
                **{
                    "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): partial(
                        gpu.cluster_sums, size=clusters, sizes=sizes
                    )
                    for sizes in _sizes(clusters, groups)
                },
            },
            error=partial(_sums_error, clusters),
            tolerance=1e-5,
            bytes=groups * (tokens * (dim * size + 4) + clusters * (dim + 1) * 4),
            flops=groups * tokens * dim,
            part=True,
        )


def _sizes(clusters: int, groups: int) -> Iterator[dict[str, int]]:
    for rows, block, programs, warps, stages in product((64, 128, 256), (32, 64, 128), (1, 2, 4, 8), (4, 8), (2, 3)):
        splits = max(1, 132 * programs // (groups * -(-clusters // rows)))
        if rows // 2 < clusters and rows <= 32 * warps and splits <= 64:
            yield {"clusters": rows, "tokens": block, "splits": splits, "warps": warps, "stages": stages}


def _inputs(
    batch: int, heads: int, tokens: int, clusters: int, dim: int, dtype: str, seed: int
) -> tuple[jax.Array, ...]:
    x = jax.random.normal(jax.random.key(seed), (batch, heads, tokens, dim), jnp.dtype(dtype))
    return x, jnp.ones((batch, tokens), bool), x[:, :, :clusters], jnp.full((batch,), clusters, jnp.int32)


def _labelled(
    batch: int, heads: int, tokens: int, clusters: int, dim: int, dtype: str, seed: int
) -> tuple[jax.Array, ...]:
    x = jax.random.normal(jax.random.key(seed), (batch, heads, tokens, dim), jnp.dtype(dtype))
    return x, jax.random.randint(jax.random.key(~seed), (batch, heads, tokens), 0, clusters + 1)


def _segment_sums(clusters: int, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By XLA's scatter, which adds up in any order."""
    one = jax.vmap(jax.vmap(partial(jax.ops.segment_sum, num_segments=clusters)))
    return one(x.astype(jnp.float32), labels), one(jnp.ones(labels.shape), labels)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Of the first head's centroids, after as many iterations in float64."""
    dtype, x = inputs[0].dtype, np.asarray(inputs[0][0, 0], np.float64)
    centroids = np.asarray(inputs[2][0, 0], np.float64)
    for _ in range(ITERATIONS):
        direction = (centroids / np.linalg.norm(centroids, axis=-1, keepdims=True)).astype(np.float32).astype(dtype)
        labels = (x @ direction.astype(np.float64).T).argmax(axis=-1)
        for cluster in np.unique(labels):
            centroids[cluster] = x[labels == cluster].mean(axis=0)
    return relative_error(out[0][0, 0], centroids)


def _sums_error(clusters: int, inputs: tuple[Any, ...], out: Any) -> float:
    x, labels = (np.asarray(given[0, 0]) for given in inputs)
    member = (labels[None] == np.arange(clusters)[:, None]).astype(np.float64)
    expected = member @ x.astype(np.float64)
    return max(relative_error(out[0][0, 0], expected), relative_error(out[1][0, 0], member.sum(axis=-1)))
