"""Benchmark cases of `chunk_similarity`, which finds each even slot's most similar odd slot in its chunk (Chelsea).

Of a whole prompt, of a cache with sinks before its chunks, and in larger chunks.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import chunk_similarity
from kvjax.pallas_kernels.cluster_merging import RESOLUTION
from kvjax.pallas_kernels.cluster_merging import chunk_similarity_pallas_triton as pallas_triton

from .case import Case, relative_error

SHAPES = (
    (1, 65536, 65536, 256, 128, "bfloat16"),
    (1, 13312, 13200, 256, 128, "bfloat16"),
    (8, 3456, 3360, 256, 128, "bfloat16"),
    (8, 13312, 13200, 256, 128, "bfloat16"),
    (1, 65536, 65536, 256, 64, "float32"),
    (1, 65536, 65536, 256, 128, "float32"),
    (1, 131072, 131072, 2048, 128, "bfloat16"),
)
"""Sequences, slots, tokens per sequence, slots per chunk, head dim, dtype."""

HEADS = 8

SINKS = 16
"""Slots before the first chunk, if there are fewer tokens than slots."""

SAMPLE = 4
"""Number of first chunks that are checked."""


def cases() -> Iterator[Case]:
    """Normal keys."""
    for rows, places, tokens, chunk, dim, dtype in SHAPES:
        yield Case(
            operation="chunk_similarity",
            shape=f"{rows} of {tokens} tokens, K{HEADS}, chunks of {chunk}, H{dim}",
            dtype=dtype,
            inputs=partial(_inputs, rows, places, tokens, dim, dtype),
            variants={
                "xla": partial(chunk_similarity, chunk=chunk, implementation="xla"),
                "auto": partial(chunk_similarity, chunk=chunk),
                **{
                    "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items()): partial(
                        pallas_triton.chunk_similarity, chunk=chunk, sizes=sizes
                    )
                    for sizes in _sizes(dtype, chunk // 2)
                },
            },
            error=partial(_error, chunk),
            tolerance=2 * RESOLUTION,
            bytes=rows * HEADS * tokens * (jnp.dtype(dtype).itemsize * dim + 4),
            flops=rows * HEADS * tokens * (chunk // 2) * dim,
        )


def _sizes(dtype: str, half: int) -> Iterator[dict[str, int]]:
    wide = dtype == "float32"
    rows, columns = ((32, 64, 128), (32, 64, 128)) if wide else ((64, 128, 256), (32, 64, 128))
    for row, column, warps, stages in product(rows, columns, (4, 8), (1, 2) if wide else (2, 3)):
        if max(row, column) <= half and 2048 <= row * column <= 8192 * (warps // 4):
            yield {"rows": row, "columns": column, "warps": warps, "stages": stages}


def _inputs(rows: int, places: int, tokens: int, dim: int, dtype: str, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.normal(jax.random.key(seed), (rows, HEADS, places, dim), jnp.dtype(dtype))
    first = SINKS if tokens < places else 0
    return keys, jnp.full((rows,), first, jnp.int32), jnp.full((rows,), tokens, jnp.int32)


def _error(chunk: int, inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the similarities, and of those of the chosen edges, to the best ones.

    For the first chunks and the last chunk of the first head.
    """
    keys, first, count = inputs
    key = np.asarray(keys[0, 0, int(first[0]) :][: int(count[0])], np.float64)
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    scores, places = (np.asarray(x[0, 0]) for x in out)
    chunks = -(-len(unit) // chunk)
    worst = 0.0
    for number in (*range(SAMPLE), chunks - 1):
        mine = unit[number * chunk :][:chunk]
        cosine = mine[0::2] @ mine[1::2].T
        score, place = scores[number][: len(cosine)], places[number][: len(cosine)]
        chosen = np.take_along_axis(cosine, place[:, None], axis=-1)[:, 0]
        best = cosine.max(axis=-1)
        worst = max(worst, relative_error(chosen, best), relative_error(score, best))
    if np.isfinite(scores[-1][-1]) and len(unit) < scores.size * 2 - 1:
        return float("inf")
    return worst
