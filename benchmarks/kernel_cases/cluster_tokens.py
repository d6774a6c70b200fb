"""Benchmark cases of `cluster_tokens`, which chooses the tokens of each query's best clusters (ClusterKV).

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import cluster_tokens
from kvjax.pallas_kernels.top_k import cluster_tokens_pallas_triton as pallas_triton

from .case import Case

SHAPES = tuple(product((1, 8), (16384, 32768, 65536)))
"""Sequences and tokens. There is one cluster per 80 tokens."""

HEADS, GROUP, SIZE = 8, 4, 1008
"""KV heads, queries per KV head, and tokens chosen: a budget of 1024 less ClusterKV's 16 sinks."""


def cases() -> Iterator[Case]:
    """Clusters of random sizes and normal scores."""
    for batch, tokens in SHAPES:
        clusters, queries = tokens // 80, batch * HEADS * GROUP
        yield Case(
            operation="cluster_tokens",
            shape=f"{SIZE} of {tokens} tokens in {clusters} clusters, B{batch} K{HEADS} G{GROUP}",
            dtype="float32",
            inputs=partial(_inputs, batch, tokens, clusters),
            variants={
                "xla": partial(cluster_tokens, size=SIZE, implementation="xla"),
                "auto": partial(cluster_tokens, size=SIZE),
                **{
                    f"gpu places={places} warps={warps}": partial(
                        pallas_triton.cluster_tokens, size=SIZE, tuning={"places": places, "warps": warps}
                    )
                    for places, warps in product((256, 512, 1024), (1, 2, 4, 8, 16))
                },
            },
            error=_error,
            tolerance=0.0,  # results are discrete and must match exactly
            # int32 or float32: scores, token indices read and written, a one-byte mask; sizes and starts of clusters
            bytes=queries * (4 * clusters + SIZE * (4 + 4 + 1)) + batch * HEADS * 8 * clusters,
            flops=0,
        )


def _inputs(batch: int, tokens: int, clusters: int, seed: int) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(seed)
    ends = np.sort(random.integers(0, tokens + 1, size=(batch, HEADS, clusters)), axis=-1)
    starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    order = random.permuted(np.tile(np.arange(tokens, dtype=np.int32), (batch, HEADS, 1)), axis=-1)
    scores = random.normal(size=(batch, HEADS, GROUP, clusters)).astype(np.float32)
    room = jnp.full((batch,), SIZE, jnp.int32)
    return jnp.asarray(scores), *(jnp.asarray(x, jnp.int32) for x in (ends - starts, starts, order)), room


def _error(inputs: tuple[Any, ...], out: Any) -> float:
    """Share of queries of the first sequence whose set of tokens differs from NumPy's. Order does not count."""
    scores, sizes, starts, order, room = (np.asarray(x)[0] for x in inputs)
    index, live = (np.asarray(x)[0] for x in out)
    wrong = []
    for head, query in np.ndindex(scores.shape[:2]):
        best = np.argsort(-scores[head, query], kind="stable")
        tokens = [order[head, starts[head, i] : starts[head, i] + sizes[head, i]] for i in best]
        got = np.sort(index[head, query][live[head, query]])
        wrong.append(not np.array_equal(got, np.sort(np.concatenate(tokens)[:room])))
    return float(np.mean(wrong))
