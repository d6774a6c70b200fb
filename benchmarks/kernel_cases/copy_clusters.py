"""Benchmark cases of `copy_clusters`, which copies merged tokens back into the cache (Chelsea).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Clusters, copy_clusters
from kvjax.pallas_kernels.cluster_merging import merge_clusters_pallas_triton as pallas_triton

from .case import Case

HEADS, DIM = 8, 128
"""KV heads, head dim."""

SHAPES = ((1, 3456, 3360), (1, 13312, 13200), (8, 3456, 3360), (8, 13312, 13200))
"""Sequences, slots, tokens per sequence."""


def cases() -> Iterator[Case]:
    """Random tokens."""
    for rows, places, tokens in SHAPES:
        yield Case(
            operation="copy_clusters",
            shape=f"{rows} of {tokens} tokens in {places} places, K{HEADS}, H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, places, tokens),
            variants={
                "xla": lambda tokens, _: jax.tree.map(jnp.copy, tokens),
                "auto": partial(_copy, copy_clusters),
                **{
                    f"gpu rows={count} warps={warps}": partial(
                        _copy, partial(pallas_triton.copy_clusters, sizes={"rows": count, "warps": warps})
                    )
                    for count, warps in product((16, 32, 64, 128), (2, 4, 8))
                },
            },
            error=_error,
            tolerance=0.0,
            bytes=rows * HEADS * tokens * 2 * (4 * DIM + 8),
            flops=0,
        )


def _inputs(rows: int, places: int, tokens: int, seed: int) -> tuple[Any, ...]:
    shape = rows, HEADS, places
    k, v = (jax.random.normal(key, (*shape, DIM), jnp.bfloat16) for key in jax.random.split(jax.random.key(seed)))
    pos = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), shape)
    held = Clusters(k, v, pos, jnp.ones(shape, jnp.float32))
    return held, jnp.full((rows,), tokens, jnp.int32)


def _copy(copy: Callable[..., Any], tokens: Clusters, size: jax.Array) -> Any:
    """Copy into empty arrays. Arrays that are used again would be copied first."""
    return copy(tokens, size, Clusters(*(jax.lax.empty(x.shape, x.dtype) for x in tokens)))


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Share of entries that differ."""
    tokens, size = inputs
    held = int(size[0])
    wrong = [np.asarray(x[:, :, :held]) != np.asarray(y[:, :, :held]) for x, y in zip(tokens, out, strict=True)]
    return float(np.mean([part.mean() for part in wrong]))
