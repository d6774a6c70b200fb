"""Edges inside chunks: as Chelsea asks for them, keys beside values in float32, and in larger chunks of bfloat16 keys."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import chunk_similarity
from kvjax.pallas_kernels.chunk_similarity import RESOLUTION, gpu

from .case import Case, relative_error

SHAPES = (
    (2048, 256, 128, 256, "float32"),
    (2048, 256, 64, 128, "float32"),
    (2048, 256, 128, 256, "bfloat16"),
    (512, 2048, 128, 128, "bfloat16"),
)
"""Chunks, places in a chunk, head dim, channels in a row, dtype."""

SAMPLE = 4
"""Chunks that are checked."""


def cases() -> Iterator[Case]:
    """Normal keys, the last chunk half full."""
    for chunks, chunk, dim, width, dtype in SHAPES:
        yield Case(
            operation="chunk_similarity",
            shape=f"{chunks} chunks of {chunk}, H{dim} of {width} channels",
            dtype=dtype,
            inputs=partial(_inputs, chunks, chunk, width, dtype),
            variants={
                "xla": partial(chunk_similarity, head_dim=dim, implementation="xla"),
                "auto": partial(chunk_similarity, head_dim=dim),
                **{
                    "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): partial(
                        gpu.chunk_similarity, dim=dim, sizes=sizes
                    )
                    for sizes in _sizes(dtype, chunk // 2)
                },
            },
            error=partial(_error, dim),
            tolerance=2 * RESOLUTION,
            bytes=chunks * chunk * (jnp.dtype(dtype).itemsize * dim + 4),
            flops=2 * chunks * (chunk // 2) ** 2 * dim,
        )


def _sizes(dtype: str, half: int) -> Iterator[dict[str, int]]:
    wide = dtype == "float32"
    rows, columns = ((32, 64, 128), (32, 64, 128)) if wide else ((64, 128, 256), (32, 64, 128))
    for row, column, warps, stages in product(rows, columns, (4, 8), (1, 2) if wide else (2, 3)):
        if max(row, column) <= half and 2048 <= row * column <= 8192 * (warps // 4):
            yield {"rows": row, "columns": column, "warps": warps, "stages": stages}


def _inputs(chunks: int, chunk: int, width: int, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.normal(jax.random.key(seed), (chunks, chunk, width), jnp.dtype(dtype))
    return keys, jnp.arange(chunks * chunk, dtype=jnp.int32).reshape(chunks, chunk) < (chunks - 0.5) * chunk


def _error(dim: int, inputs: tuple[Any, ...], out: Any) -> float:
    """How far the similarities are from the best ones, or those of the chosen edges are."""
    worst = 0.0
    keys, live = inputs
    for sample in (*range(SAMPLE), -1):
        key, alive = np.asarray(keys[sample, :, :dim], np.float64), np.asarray(live[sample])
        unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
        cosine = np.where(alive[1::2], unit[0::2] @ unit[1::2].T, -np.inf)[alive[0::2]]
        chosen = np.take_along_axis(cosine, np.asarray(out.place[sample])[alive[0::2], None], axis=-1)[:, 0]
        best = cosine.max(axis=-1)
        score = np.asarray(out.score[sample])
        if np.isfinite(score[~alive[0::2]]).any():
            return float("inf")
        worst = max(worst, relative_error(chosen, best), relative_error(score[alive[0::2]], best))
    return worst
