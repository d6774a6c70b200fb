"""Benchmark cases of `write_slots`: a new token is written into all arrays of a cache (every policy).

At Llama-3.1-8B's shape, into one cache, and into CateKV's two (`write_sharded_slots`).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import DeferredRope, SlotUpdate, write_sharded_slots

from .case import Case

KV_HEADS, DIM = 8, 128
"""KV heads, head dim."""

ALL = tuple(range(KV_HEADS))
DIVIDED = (2432, (1, 2, 4, 5, 7)), (16768, (0, 3, 6))
LAYOUTS = (1, ((16768, ALL),)), (8, ((3456, ALL),)), (1, DIVIDED), (8, DIVIDED)
"""Sequences; slots and heads of each cache."""


def cases() -> Iterator[Case]:
    """Random slots. One is beyond the end, where nothing may be written."""
    for rows, caches in LAYOUTS:
        yield Case(
            operation="write_slots",
            shape=f"B{rows} " + " and ".join(f"K{len(heads)} of C{slots}" for slots, heads in caches) + f", H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, caches),
            variants={name: partial(_write, caches, implementation=name) for name in ("xla", "auto")},
            error=partial(_error, caches),
            tolerance=2**-8,
            bytes=rows * KV_HEADS * (2 * 2 * 2 * DIM + 2 * 4),
            flops=0,
        )


def _write(caches: Any, *inputs: Any, implementation: Any) -> list[list[jax.Array]]:
    k, v, angle, pos, *states = inputs
    values = [DeferredRope(k, jnp.cos(angle), jnp.sin(angle)), v, pos[:, None], 1.0]
    writings = [
        SlotUpdate(arrays, slot, values, [slot, seen], heads)
        for (arrays, slot, seen), (_, heads) in zip(states, caches, strict=True)
    ]
    return write_sharded_slots(writings, implementation=implementation)


def _inputs(rows: int, caches: Any, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 4 + 4 * len(caches)))
    k, v = (jax.random.normal(next(keys), (rows, KV_HEADS, DIM), jnp.bfloat16) for _ in "kv")
    angle = jax.random.uniform(next(keys), (rows, DIM // 2), maxval=2 * np.pi)
    pos = jax.random.randint(next(keys), (rows,), 0, 65536, jnp.int32)
    states = []
    for slots, heads in caches:
        shape = rows, len(heads), slots
        stores = [jax.random.normal(next(keys), (*shape, DIM), jnp.bfloat16) for _ in "kv"]
        marks = [jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)]
        slot = jax.random.randint(next(keys), shape[:2], 0, slots, jnp.int32).at[0, 0].set(slots)
        states.append(([*stores, *marks], slot, jax.random.randint(next(keys), (rows,), 0, slots, jnp.int32)))
    return k, v, angle, pos, *states


def _error(caches: Any, inputs: tuple[Any, ...], out: Any) -> float:
    """Largest relative difference of a key; infinite if anything else differs."""
    k, v, angle, pos, *states = inputs
    first, second = np.split(np.asarray(k, np.float64), 2, axis=-1)
    cos, sin = (f(np.asarray(angle, np.float64))[:, None] for f in (np.cos, np.sin))
    k, worst = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), 0.0
    for (arrays, slot, seen), (slots, heads), (*news, following, counted) in zip(states, caches, out, strict=True):
        there = np.asarray(slot) < slots
        rows, places = np.nonzero(there)
        at, mine = np.asarray(slot)[there], np.asarray(heads)[places]
        wrong = not (np.array_equal(following, slot + 1) and np.array_equal(counted, seen + 1))
        for old, new in zip(arrays, news, strict=True):
            changed = np.array(jnp.any((old != new).reshape(*old.shape[:3], -1), axis=-1))
            changed[rows, places, at] = False
            wrong |= bool(changed.any())
        key, *written = (np.asarray(new[rows, places, at]) for new in news)
        values = np.asarray(v)[rows, mine], np.asarray(pos)[rows], np.ones(len(rows), np.float32)
        if wrong or not all(np.array_equal(new, value) for new, value in zip(written, values, strict=True)):
            return float("inf")
        expected = k[rows, mine]
        worst = max(worst, float(np.max(np.abs(key.astype(np.float64) - expected) / np.maximum(np.abs(expected), 1.0))))
    return worst
