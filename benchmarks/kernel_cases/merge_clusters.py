"""A step of Chelsea's clustering once its edges are chosen: keys beside values in float32, of a cache that is full or nearly empty."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import merge_clusters
from kvjax.pallas_kernels.merge_clusters import gpu

from .case import Case, relative_error

PLACES, HEADS, CHUNK, WIDTH = 32768, 8, 256, 256

HELD = (32768, 8192)
"""Tokens of a row."""

SHARE = 0.5
"""Of the even places, those whose tokens are merged: a quarter of all tokens go, as in a step of four on the way to a fifth."""


def cases() -> Iterator[Case]:
    """Random edges of random tokens."""
    for held in HELD:
        left = int(held * (1 - SHARE / 2))
        yield Case(
            operation="merge_clusters",
            shape=f"{held} of {PLACES} places, chunks of {CHUNK}, K{HEADS}, {WIDTH} channels",
            dtype="float32",
            inputs=partial(_inputs, held),
            variants={
                "xla": partial(merge_clusters, implementation="xla"),
                "auto": merge_clusters,
                **{
                    f"gpu channels={channels} warps={warps}": partial(
                        gpu.merge_clusters, sizes={"channels": channels, "warps": warps}
                    )
                    for channels, warps in product((32, 64, 128), (2, 4, 8))
                },
            },
            error=_error,
            tolerance=1e-6,
            bytes=HEADS * (held + left) * (4 * WIDTH + 8) + HEADS * held // 2 * 4,
            flops=0,
        )


def _inputs(held: int, seed: int) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(seed)
    shape = 1, HEADS, PLACES
    edges = 1, HEADS, PLACES // CHUNK, CHUNK // 2
    target = random.integers(0, CHUNK // 2, size=edges)
    there = np.arange(0, PLACES, 2).reshape(edges[2:]) < held
    target = np.where(there & (random.random(edges) < SHARE), target, -1)
    return (
        jax.random.normal(jax.random.key(seed), (*shape, WIDTH)),
        jnp.broadcast_to(jnp.arange(PLACES, dtype=jnp.int32), shape),
        jnp.asarray(random.integers(1, 9, shape), jnp.float32),
        jnp.asarray(target, jnp.int32),
        jnp.full((1,), held, jnp.int32),
    )


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Of the first head's rows; infinite if a position or a weight is wrong."""
    kv, pos, weight, target = (np.asarray(x)[0, 0] for x in inputs[:4])
    held = int(inputs[4][0])
    total, newest, weights = weight[:, None] * kv.astype(np.float64), pos.copy(), weight.astype(np.float64)
    gone = np.zeros(PLACES, bool)
    chunk, pair = np.nonzero(target >= 0)
    source, into = chunk * CHUNK + 2 * pair, chunk * CHUNK + 2 * target[chunk, pair] + 1
    gone[source] = True
    for array, add in ((total, np.add), (weights, np.add), (newest, np.maximum)):
        add.at(array, into, array[source])
    stays = np.flatnonzero(~gone[:held])
    got_kv, got_pos, got_weight = (np.asarray(x)[0, 0, : len(stays)] for x in out)
    if not (np.array_equal(got_pos, newest[stays]) and np.array_equal(got_weight, weights[stays])):
        return float("inf")
    return relative_error(got_kv, total[stays] / weights[stays, None])
