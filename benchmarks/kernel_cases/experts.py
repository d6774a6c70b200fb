"""Benchmark cases of `expert_mlp`: decode steps and prefill of a mixture of experts.

One layer of Qwen3-30B-A3B's shape: each token has 8 of 128 experts.

`benchmarks.kernels` times them, and `tests/device/test_kernels.py` checks them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import Norm, expert_mlp
from kvjax.pallas_kernels.experts import few_pairs_pallas_triton as few_pairs
from kvjax.pallas_kernels.experts import many_pairs_pallas_triton as many_pairs

from .case import Case, relative_error

EXPERTS, EACH, DIM, WIDTH = 128, 8, 2048, 768

EPS = 1e-6
"""Epsilon of the tokens' norm."""

CHECKED = 3
"""Number of tokens compared with float64."""


def cases() -> Iterator[Case]:
    """Even load of the experts, which norm their tokens."""
    for tokens in (1, 8, 16, 64, 4096, 16384):
        hit = EXPERTS * (1 - (1 - EACH / EXPERTS) ** tokens)
        flops = 6 * tokens * EACH * DIM * WIDTH
        variants = {name: partial(_normed, expert_mlp, implementation=name) for name in ("xla", "auto", "gpu")}
        yield Case(
            operation="expert_mlp",
            shape=f"{tokens} x {DIM}, {EACH} of {EXPERTS} x {WIDTH}",
            dtype="bfloat16",
            inputs=partial(_inputs, tokens),
            variants=variants | dict(_sized(tokens)),
            error=_error,
            tolerance=1e-2,
            bytes=round(hit * 3 * DIM * WIDTH * 2 + tokens * DIM * 6),
            flops=flops,
        )


def _sized(tokens: int) -> Iterator[tuple[str, Any]]:
    options: dict[str, Any] = {"activation": "silu", "total": None}
    if tokens <= few_pairs.FEW_ROWS:
        for inputs, warps, stages in product((64, 128, 256), (1, 2, 4), (3, 4)):
            sizes = {"inputs": inputs, "warps": warps, "stages": stages}
            yield _name(sizes), partial(_normed, few_pairs.expert_mlp, sizes=sizes, **options)
        return
    tiles = (16, 32) if tokens < 1024 else (64, 128)
    for pairs, columns, inputs, warps, stages in product(tiles, (64, 128), (64,), (4, 8), (3, 4)):
        sizes = {"pairs": pairs, "columns": columns, "inputs": inputs, "warps": warps, "stages": stages}
        yield _name(sizes), partial(_normed, many_pairs.expert_mlp, sizes=sizes, **options)


def _normed(function: Any, gain: jax.Array, *arrays: jax.Array, **options: Any) -> jax.Array:
    return function(*arrays, norm=Norm(gain, EPS), **options)


def _name(sizes: dict[str, int]) -> str:
    return "gpu " + " ".join(f"{name}={value}" for name, value in sizes.items())


def _inputs(tokens: int, seed: int) -> tuple[jax.Array, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    _, experts = jax.lax.top_k(jax.random.normal(next(keys), (tokens, EXPERTS)), EACH)
    weights = jax.nn.softmax(jax.random.normal(next(keys), (tokens, EACH)))
    x = jax.random.normal(next(keys), (tokens, DIM), jnp.bfloat16)
    shapes = (EXPERTS * WIDTH, DIM), (EXPERTS * WIDTH, DIM), (EXPERTS * DIM, WIDTH)
    matrices = [jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[1] ** -0.5 for shape in shapes]
    gain = 1 + 0.1 * jax.random.normal(next(keys), (DIM,), jnp.bfloat16)
    return gain, x, experts.astype(jnp.int32), weights, *matrices


def _error(inputs: tuple[Any, ...], out: jax.Array) -> float:
    gain, x, experts, weights, *matrices = inputs
    gate, up, down = (w.reshape(EXPERTS, -1, w.shape[1]) for w in matrices)
    rows = np.linspace(0, len(x) - 1, min(CHECKED, len(x))).astype(int)
    expected = np.zeros((len(rows), DIM))
    for at, row in enumerate(rows):
        token = np.asarray(x[row], np.float64)
        token = token / np.sqrt(np.mean(token**2) + EPS) * np.asarray(gain, np.float64)
        for expert, weight in zip(np.asarray(experts[row]), np.asarray(weights[row], np.float64), strict=True):
            first, second, last = (np.asarray(w[expert], np.float64) for w in (gate, up, down))
            hidden = first @ token
            expected[at] += weight * (last @ (hidden / (1 + np.exp(-hidden)) * (second @ token)))
    return relative_error(np.asarray(out[rows], np.float64), expected)
