"""Benchmark cases of `sharded_decode_attention`, decode attention over several caches of a layer (CateKV).

At Llama-3.1-8B's shape, with five consistent and three adaptive heads.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import CacheShard, sharded_decode_attention
from kvjax.pallas_kernels.decode_attention import sharded_decode_attention_pallas_triton as pallas_triton

from .case import Case, relative_error

GROUP, DIM, SCALE = 4, 128, 128**-0.5
"""Query heads per KV head, head dim, scale of the logits."""

HEADS = (1, 2, 4, 5, 7), (0, 3, 6)
"""Consistent and adaptive KV heads."""

SHORT, FREE = 2432, 300
"""Slots of consistent heads, and free slots of either cache."""

CASES = ((1, 16768), (1, 66048), (8, 16768), (8, 66048), (32, 29568))
"""Sequences, and slots of adaptive heads."""


def cases() -> Iterator[Case]:
    """Normal queries, keys and values."""
    for rows, long in CASES:
        live = rows * sum(len(heads) * (slots - FREE) for heads, slots in zip(HEADS, (SHORT, long), strict=True))
        blocks = rows * sum(len(heads) * -(-slots // 64) for heads, slots in zip(HEADS, (SHORT, long), strict=True))
        yield Case(
            operation="sharded_decode_attention",
            shape=f"B{rows} K5 of C{SHORT} and K3 of C{long}, G{GROUP} H{DIM}",
            dtype="bfloat16",
            inputs=partial(_inputs, rows, long),
            variants={
                "xla": partial(_attend, implementation="xla"),
                "auto": _attend,
                **{
                    f"gpu programs={count} stages={stages}": partial(
                        _attend, sizes={"block": 64, "part": -(-blocks // count), "warps": 4, "stages": stages}
                    )
                    for count in (256, 512, 1024, 2048, 4096)
                    for stages in (2, 3)
                },
            },
            error=_error,
            tolerance=1e-2,
            bytes=live * (2 * 2 * DIM + 4) + 2 * 2 * rows * 8 * GROUP * DIM,
            flops=4 * live * GROUP * DIM,
        )


def _held(caches: Any) -> list[CacheShard]:
    return [CacheShard(k, v, weight, heads) for (k, v, weight), heads in zip(caches, HEADS, strict=True)]


def _attend(q: jax.Array, *caches: Any, implementation: Any = "auto", sizes: dict[str, int] | None = None) -> jax.Array:
    if sizes is not None:
        return pallas_triton.sharded_decode_attention(q, _held(caches), scale=SCALE, sizes=sizes)
    return sharded_decode_attention(q, _held(caches), scale=SCALE, implementation=implementation)


def _inputs(rows: int, long: int, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    q = jax.random.normal(next(keys), (rows, 8 * GROUP, DIM), jnp.bfloat16)
    caches = []
    for heads, slots in zip(HEADS, (SHORT, long), strict=True):
        k, v = (jax.random.normal(next(keys), (rows, len(heads), slots, DIM), jnp.bfloat16) for _ in "kv")
        weight = jnp.broadcast_to((jnp.arange(slots) < slots - FREE).astype(jnp.float32), k.shape[:3])
        caches.append((k, v, weight))
    return q, *caches


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Relative error of the last sequence."""
    q = np.asarray(inputs[0][-1], np.float64)
    expected = np.zeros(q.shape)
    for (k, v, weight), heads in zip(inputs[1:], HEADS, strict=True):
        k, v, weight = (np.asarray(x[-1], np.float64) for x in (k, v, weight))
        for place, head in enumerate(heads):
            mine = slice(head * GROUP, (head + 1) * GROUP)
            logits = q[mine] @ k[place].T * SCALE
            share = weight[place] * np.exp(logits - logits.max(axis=-1, keepdims=True))
            expected[mine] = share @ v[place] / share.sum(axis=-1, keepdims=True)
    return relative_error(out[-1], expected)
