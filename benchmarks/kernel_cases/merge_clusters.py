"""Benchmark cases of `merge_clusters`, which merges tokens along chosen edges and closes the gaps (Chelsea).

Of a prompt, in its first and in later merges, and of caches.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Clusters, merge_clusters
from kvjax.pallas_kernels.cluster_merging import merge_clusters_pallas_triton as pallas_triton

from .case import Case, relative_error

HEADS, CHUNK, DIM, SINKS = 8, 256, 128, 16
"""KV heads, slots per chunk, head dim, and slots before the first chunk if there are fewer tokens than slots."""

SHAPES = (
    (1, 32768, 32768, 0.5, "bfloat16"),
    (1, 32768, 8192, 0.5, "bfloat16"),
    (1, 13312, 13264, 0.01, "bfloat16"),
    (8, 3456, 3424, 0.04, "bfloat16"),
    (8, 13312, 13264, 0.01, "bfloat16"),
    (1, 32768, 32768, 0.5, "float32"),
)
"""Sequences, slots, tokens per sequence, share of tokens at even slots that are merged, dtype."""


def cases() -> Iterator[Case]:
    """Random tokens and edges."""
    for rows, places, tokens, share, dtype in SHAPES:
        read = rows * HEADS * tokens
        each = 2 * DIM * jnp.dtype(dtype).itemsize + 8
        yield Case(
            operation="merge_clusters",
            shape=f"{rows} of {tokens} tokens in {places} places, chunks of {CHUNK}, {share} of half merged, K{HEADS}, H{DIM}",
            dtype=dtype,
            inputs=partial(_inputs, rows, places, tokens, share, dtype),
            variants={
                "xla": partial(merge_clusters, chunk=CHUNK, implementation="xla"),
                "auto": partial(merge_clusters, chunk=CHUNK),
                **{
                    f"gpu pairs={pairs} odd={odd} warps={warps}": partial(
                        pallas_triton.merge_clusters, chunk=CHUNK, sizes={"pairs": pairs, "odd": odd, "warps": warps}
                    )
                    for pairs, odd, warps in product((16, 32, 64), (16, 32, 64), (4, 8))
                },
            },
            error=_error,
            tolerance=1e-6 if dtype == "float32" else 2**-8,
            bytes=int(read * (2 - share / 2) * each) + read // 2 * 4,
            flops=0,
        )


def _inputs(rows: int, places: int, tokens: int, share: float, dtype: str, seed: int) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    shape = rows, HEADS, places
    first = SINKS if tokens < places else 0
    edges = rows, HEADS, -(-places // CHUNK), CHUNK // 2
    target = random.integers(0, CHUNK // 2, size=edges)
    number = np.arange(edges[2])[:, None] * CHUNK
    there = (number + 2 * np.arange(CHUNK // 2) < tokens - first) & (number + 2 * target + 1 < tokens - first)
    target = np.where(there & (random.random(edges) < share), target, -1)
    k, v = (jax.random.normal(key, (*shape, DIM), jnp.dtype(dtype)) for key in jax.random.split(jax.random.key(seed)))
    pos = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), shape)
    held = Clusters(k, v, pos, jnp.asarray(random.integers(1, 9, shape), jnp.float32))
    begin, count = (jnp.full((rows,), number, jnp.int32) for number in (first, tokens - first))
    return held, jnp.asarray(target, jnp.int32), begin, count


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the last sequence's last head; infinite if a position or a weight is wrong."""
    tokens, target, first, count = inputs
    start, end = int(first[-1]), int(first[-1] + count[-1])
    k, v, pos, weight = (np.asarray(x[-1, -1]) for x in tokens)
    total = weight[:, None] * np.concatenate([k, v], axis=-1).astype(np.float64)
    newest, weights, gone = pos.copy(), weight.astype(np.float64), np.zeros(len(pos), bool)
    target = np.asarray(target[-1, -1])
    chunk, pair = np.nonzero(target >= 0)
    source, into = start + chunk * CHUNK + 2 * pair, start + chunk * CHUNK + 2 * target[chunk, pair] + 1
    gone[source] = True
    for array, add in ((total, np.add), (weights, np.add), (newest, np.maximum)):
        add.at(array, into, array[source])
    stays = np.flatnonzero(~gone[:end])
    got_k, got_v, got_pos, got_weight = (np.asarray(x[-1, -1, : len(stays)]) for x in out)
    if not (np.array_equal(got_pos, newest[stays]) and np.array_equal(got_weight, weights[stays])):
        return float("inf")
    return relative_error(np.concatenate([got_k, got_v], axis=-1), total[stays] / weights[stays, None])
