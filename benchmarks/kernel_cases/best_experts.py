"""Benchmark cases of `best_experts`: the router of a mixture of experts in decode steps and prefill.

Each token of Qwen3-30B-A3B has 8 of 128 experts. `benchmarks.kernels` times the cases, and `tests/device/test_kernels.py`
checks them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import best_experts

from .case import Case

EXPERTS, EACH = 128, 8


def cases() -> Iterator[Case]:
    """Random logits."""
    for tokens in (1, 8, 16384):
        yield Case(
            operation="best_experts",
            shape=f"{tokens} x {EXPERTS}, {EACH} each",
            dtype="bfloat16",
            inputs=partial(_inputs, tokens),
            variants={name: partial(_chosen, name) for name in ("xla", "auto", "gpu")},
            error=_error,
            tolerance=1e-2,
            bytes=tokens * (EXPERTS * 2 + EACH * 8),
            flops=0,
        )


def _chosen(implementation: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return best_experts(logits, EACH, normalized=True, implementation=implementation)


def _inputs(tokens: int, seed: int) -> tuple[jax.Array, ...]:
    return (jax.random.normal(jax.random.key(seed), (tokens, EXPERTS), jnp.bfloat16),)


def _error(inputs: tuple[Any, ...], out: tuple[jax.Array, jax.Array]) -> float:
    """Largest relative difference of the weights, infinity if an expert differs."""
    powers = np.exp(np.asarray(inputs[0], np.float64))
    order = np.argsort(-powers, axis=1, kind="stable")[:, :EACH]
    best = np.take_along_axis(powers, order, 1)
    experts, weights = (np.asarray(x) for x in out)
    if (experts != order).any():
        return np.inf
    return float(np.max(np.abs(weights / (best / best.sum(1, keepdims=True)) - 1)))
