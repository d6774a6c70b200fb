"""Benchmark cases of `nearest`, which finds each query's key with the highest score (in k-means, ClusterKV).

As many queries as keys, and tokens with centroids as in k-means.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import nearest
from kvjax.pallas_kernels.kmeans import nearest_pallas_triton as pallas_triton

from .case import Case, relative_error

SHAPES = (
    (512, 1024, 1024, 128, False),
    (512, 1024, 1024, 64, False),
    (64, 8192, 256, 128, True),
    (64, 8192, 64, 128, True),
    (64, 8192, 1024, 128, True),
    (64, 8192, 256, 64, True),
)
"""Groups, queries and keys per group, head dim, and whether keys have a bias, as centroids do."""

SAMPLE = 4
"""Number of groups that are checked."""


def cases() -> Iterator[Case]:
    """Normal queries and keys."""
    for (groups, queries, keys, dim, biased), dtype in product(SHAPES, ("bfloat16", "float32")):
        if dtype == "float32" and groups > 64:
            continue
        size = jnp.dtype(dtype).itemsize
        yield Case(
            operation="nearest",
            shape=f"{groups} x {queries} queries, {keys} keys, H{dim}" + (", biased" if biased else ""),
            dtype=dtype,
            inputs=partial(_inputs, groups, queries, keys, dim, biased, dtype),
            variants={
                "xla": partial(nearest, implementation="xla"),
                "auto": nearest,
                **{
                    "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): partial(
                        pallas_triton.nearest, sizes=sizes
                    )
                    for sizes in _sizes(dtype, keys)
                },
            },
            error=_error,
            tolerance=1e-5,
            bytes=groups * (size * dim * (queries + keys) + 8 * queries + 4 * keys * biased),
            flops=2 * groups * queries * keys * dim,
        )


def _sizes(dtype: str, keys: int) -> Iterator[dict[str, int]]:
    if dtype == "bfloat16":
        for queries, block, stages in product((64, 128), (64, 128, 256), (2, 3, 4)):
            if block <= keys and queries * block <= 16384:
                yield {"wgmma": 1, "queries": queries, "keys": block, "stages": stages}
    wide = dtype == "float32"
    rows, columns = ((32, 64, 128), (32, 64, 128)) if wide else ((64, 128, 256), (32, 64, 128, 256))
    for queries, block, warps, stages in product(rows, columns, (4, 8), (1, 2) if wide else (2, 3, 4)):
        if block <= keys and 2048 <= queries * block <= 8192 * (warps // 4):
            yield {"queries": queries, "keys": block, "warps": warps, "stages": stages}


def _inputs(groups: int, queries: int, keys: int, dim: int, biased: bool, dtype: str, seed: int) -> tuple[Any, ...]:
    first, second = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(first, (groups, queries, dim), jnp.dtype(dtype))
    y = jax.random.normal(second, (groups, keys, dim), jnp.dtype(dtype))
    return x, y, -0.5 * jnp.sum(jnp.square(y.astype(jnp.float32)), axis=-1) if biased else None


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the returned scores, and of those of the chosen keys, to the best ones."""
    x, y = (np.asarray(given[:SAMPLE], np.float64) for given in inputs[:2])
    scores = x @ np.swapaxes(y, 1, 2)
    if inputs[2] is not None:
        scores += np.asarray(inputs[2][:SAMPLE], np.float64)[:, None]
    chosen = np.take_along_axis(scores, np.asarray(out.place)[:SAMPLE, :, None], axis=-1)[..., 0]
    best = scores.max(axis=-1)
    return max(relative_error(chosen, best), relative_error(out.score[:SAMPLE], best))
