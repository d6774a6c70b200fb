"""Benchmark cases of `gather_attention`, attention over selected tokens (ClusterKV) or pages (Quest) of a cache.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.case import Case, relative_error
from kvjax.pallas_kernels.decode_attention import Attended
from kvjax.pallas_kernels.gather_attention import gather_attention
from kvjax.pallas_kernels.gather_attention import gather_attention_pallas_triton as pallas_triton

SAMPLED = 8
"""Number of heads (sequence × query head) compared with float64."""


def cases() -> Iterator[Case]:
    """An eighth of the cache, selected per KV or query head, by tokens or pages; and ClusterKV's selections."""
    yield _case(32, 8, 1, 8)
    yield _case(32, 8, 2, 8)
    yield _case(32, 8, 4, 8)
    yield _case(32, 8, 4, 32)
    yield _case(32, 8, 4, 8, page=16)
    yield _case(1, 8, 4, 8)
    yield _case(1, 8, 4, 32)
    yield _case(32, 8, 4, 8, dim=64)
    yield _case(1, 8, 4, 32, slots=65536, size=1344)
    yield _case(8, 8, 4, 32, slots=65536, size=1344)


def _case(
    batch: int,
    kv_heads: int,
    group: int,
    selecting: int,
    *,
    slots: int = 8192,
    size: int = 1024,
    page: int = 1,
    dim: int = 128,
) -> Case:
    heads, scale, pages = kv_heads * group, dim**-0.5, size // page

    def inputs(seed: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        q = jax.random.normal(keys[0], (batch, heads, dim), jnp.bfloat16)
        k, v = (jax.random.normal(key, (batch, kv_heads, slots, dim), jnp.bfloat16) for key in keys[1:3])
        shuffled = jnp.argsort(jax.random.uniform(keys[3], (batch, selecting, slots // page)), axis=-1)
        return q, k, v, shuffled[..., :pages].astype(jnp.int32), jnp.ones((batch, selecting, size), bool)

    def error(inputs: tuple[Any, ...], out: Attended) -> float:
        q, k, v, index, _ = inputs
        worst = 0.0
        for row, head in np.random.default_rng(0).integers(0, (batch, heads), (SAMPLED, 2)):
            first = np.asarray(index[row, head * selecting // heads])[:, None] * page
            slot = (first + np.arange(page)).reshape(-1)
            keys, values = (np.asarray(x[row, head // group][slot], np.float64) for x in (k, v))
            logits = keys @ np.asarray(q[row, head], np.float64) * scale
            weights = np.exp(logits - logits.max())
            expected = weights @ values / weights.sum()
            logsumexp = np.log(weights.sum()) + logits.max()
            worst = max(worst, relative_error(out.out[row, head], expected))
            worst = max(worst, abs(float(out.logsumexp[row, head]) - logsumexp) / abs(logsumexp))
        return worst

    call = functools.partial(gather_attention, scale=scale, page=page)
    variants = {"xla": functools.partial(call, implementation="xla"), "auto": call}
    for block in (32, 64, 128, 256):
        for splits in (1, 2, 4, 8) if batch > 1 else (4, 8, 16, 32):
            for warps, stages in ((4, 1), (4, 2), (4, 3), (8, 2)):
                if splits * block <= size:
                    sizes = {"block": block, "splits": splits, "warps": warps, "stages": stages}
                    name = f"gpu block={block} splits={splits} warps={warps} stages={stages}"
                    variants[name] = functools.partial(
                        pallas_triton.gather_attention, scale=scale, page=page, sizes=sizes
                    )
    read = batch * selecting * size * 2 * dim * 2
    return Case(
        operation="gather_attention",
        shape=f"B{batch} N{heads} K{kv_heads} R{selecting} H{dim}, {pages} pages of {page} from {slots} slots",
        dtype="bfloat16",
        inputs=inputs,
        variants=variants,
        error=error,
        tolerance=1e-2,
        bytes=read + batch * selecting * (4 * pages + size) + 2 * batch * heads * dim * 2 + 4 * batch * heads,
        flops=4 * batch * heads * size * dim,
    )
