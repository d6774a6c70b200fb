"""Benchmark cases of `widen_bounds`, which widens the bounds of a page's keys by a new key (Quest).

At Llama-3.1-8B's shape.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import DeferredRope, widen_bounds

from .case import Case

SHAPES = tuple(product((1, 8), (1048, 4120)))
"""Sequences, pages: contexts of 16k and 64k, with room for generated tokens."""

KV_HEADS, DIM, PAGE = 8, 128, 16
"""KV heads, head dim, tokens per page."""


def cases() -> Iterator[Case]:
    """Sequences at different positions within a page. The first one begins a page."""
    for batch, pages in SHAPES:
        yield Case(
            operation="widen_bounds",
            shape=f"{pages} pages, B{batch} K{KV_HEADS} H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, batch, pages),
            variants={name: partial(_widen, implementation=name) for name in ("xla", "auto")},
            error=_error,
            tolerance=2**-8,
            bytes=batch * KV_HEADS * (2 * 2 * DIM * 2 + 2 * DIM),
            flops=0,
        )


def _widen(bounds: jax.Array, key: jax.Array, angle: jax.Array, pos: jax.Array, implementation: Any) -> jax.Array:
    turned = DeferredRope(key, jnp.cos(angle), jnp.sin(angle))
    return widen_bounds(bounds, turned, pos, page=PAGE, implementation=implementation)


def _inputs(batch: int, pages: int, seed: int) -> tuple[jax.Array, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    bounds = jax.random.normal(next(keys), (batch, KV_HEADS, pages, 2 * DIM), jnp.bfloat16)
    key = jax.random.normal(next(keys), (batch, KV_HEADS, DIM), jnp.bfloat16)
    angle = jax.random.uniform(next(keys), (batch, DIM // 2), maxval=2 * np.pi)
    return bounds, key, angle, (pages // 2 * PAGE + jnp.arange(batch) * 3).astype(jnp.int32)


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Largest relative difference on the newest token's page; infinite if another page has changed."""
    bounds, key, angle, pos = inputs
    pages = np.asarray(pos) // PAGE
    changed = np.array(jnp.any(out != bounds, axis=(1, 3)))  # [B, P]
    rows = np.arange(len(pages))
    changed[rows, pages] = False
    if changed.any():
        return float("inf")
    key, angle, before, after = (
        np.asarray(x, np.float64) for x in (key, angle, bounds[rows, :, pages], out[rows, :, pages])
    )
    first, second = np.split(key, 2, axis=-1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    key = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    low, high = np.split(before, 2, axis=-1)
    wider = np.concatenate([np.minimum(low, key), np.maximum(high, key)], axis=-1)
    begins = (np.asarray(pos) % PAGE == 0)[:, None, None]
    expected = np.where(begins, np.concatenate([key, key], axis=-1), wider)
    return float(np.max(np.abs(after - expected) / np.maximum(np.abs(expected), 1.0)))
