"""Benchmark cases of `tree_eviction`, one eviction in every head (TreeKV).

At Llama-3.1-8B's shape, with a fifth of 16k and 64k tokens.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Ranked, tree_eviction

from .case import Case

HEADS, SINKS = 8, 4
"""KV heads, and first tokens that are never evicted."""

SIZES = tuple(product((1, 8), (3456, 13184)))
"""Sequences and slots."""


def cases() -> Iterator[Case]:
    """Ranks in random order, and random scores."""
    for rows, slots in SIZES:
        yield Case(
            operation="tree_eviction",
            shape=f"B{rows} K{HEADS} C{slots}",
            dtype="int32",
            inputs=partial(_inputs, rows, slots),
            variants={name: partial(_evict, implementation=name) for name in ("xla", "auto")},
            error=_error,
            tolerance=0.0,
            bytes=4 * rows * HEADS * 2 * slots,
            flops=0,
        )


def _evict(rank: jax.Array, score: jax.Array, steps: jax.Array, scope: jax.Array, implementation: Any) -> Ranked:
    rows, _, slots = rank.shape
    live = rank < slots
    kept = jnp.full(scope.shape, slots - 8, jnp.int32)
    ranked = Ranked(rank, jnp.where(live, rank, -1), live.astype(jnp.float32), kept, jnp.zeros_like(scope), scope)
    tree, budget = (jnp.full((rows,), size, jnp.int32) for size in (slots // 2, slots - 9))
    options = {"sinks": SINKS, "stride": 1, "scored": True, "implementation": implementation}
    return tree_eviction(ranked, score, steps, tree, budget, **options)


def _inputs(rows: int, slots: int, seed: int) -> tuple[jax.Array, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    ranks = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, HEADS, slots))
    rank = jax.random.permutation(next(keys), ranks, axis=-1, independent=True)
    rank = jnp.where(rank < slots - 8, rank, slots)
    score = jax.random.uniform(next(keys), rank.shape)
    steps = jax.random.randint(next(keys), rank.shape, 1, 100).astype(jnp.float32)
    return rank, score, steps, jax.random.randint(next(keys), (rows, HEADS), 0, slots // 2, jnp.int32)


def _error(inputs: tuple[Any, ...], out: Ranked) -> float:
    """Share of heads with a wrong rank."""
    rank, score, steps, scope = map(np.asarray, inputs)
    slots, wrong = rank.shape[-1], 0
    for row, head in np.ndindex(scope.shape):
        by_age = list(np.argsort(rank[row, head], kind="stable")[: slots - 8])
        older = SINKS + scope[row, head]
        means = [np.float32(score[row, head, by_age[at]]) / steps[row, head, by_age[at]] for at in (older, older + 1)]
        by_age.pop(older + int(means[0] > means[1]))
        expected = np.full(slots, slots)
        expected[by_age] = np.arange(len(by_age))
        wrong += not np.array_equal(expected, np.asarray(out.rank)[row, head])
    return wrong / scope.size
