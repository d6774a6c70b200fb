"""Random models of the widths that the kernels are made for, and what one generation left behind."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models import ModelConfig, Params, init
from kvjax.models.rope import RopeConfig
from kvjax.policies import Policy
from kvjax.policies.capabilities import as_cache
from kvjax.runtime.engine import Engine

SMALL = ModelConfig("llama", 97, 256, 512, 2, 8, 2, 64, 1024, RopeConfig(1e4, 64))
"""2 layers of 8 query heads on 2 KV heads of 64."""

PROMPTS = [np.random.default_rng(i).integers(0, 97, size).tolist() for i, size in enumerate((150, 3, 60, 33))]
"""Rows of a ragged batch: longer than the budget, much shorter, about as long."""

BUDGET, NEW = 48, 40


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of reading prompts and generating greedily.

    Attributes:
        tokens, logprobs: [B, NEW].
        pos, weight: of each layer [B, K, C], in order of position.
        layers: how many layers there are.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    pos: list[np.ndarray]
    weight: list[np.ndarray]


def small() -> Params:
    """The small model with random weights, the same on every device."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, init(SMALL, jax.random.key(0)))


def generated(policy: Policy, params: Params, prompts: list[list[int]] = PROMPTS) -> Outcome:
    """Greedy tokens, their log-probabilities, and what the caches hold at the end."""
    params = jax.tree.map(jnp.asarray, params)
    engine = Engine(params, policy, batch=len(prompts), prompt_len=max(map(len, prompts)), max_new_tokens=NEW)
    state, first = engine.prefill(prompts)
    token = np.asarray(state.token)
    state, tokens, logprobs = engine.decode(state, NEW - 1)
    pos, weight = [], []
    for layer, cache in zip(engine.layers, state.caches, strict=True):
        slots = as_cache(layer, cache)
        order = np.argsort(np.asarray(slots.pos), axis=-1, kind="stable")
        pos.append(np.take_along_axis(np.asarray(slots.pos), order, axis=-1))
        weight.append(np.take_along_axis(np.asarray(slots.weight), order, axis=-1))

    def whole(first: Any, rest: Any) -> np.ndarray:
        return np.concatenate([np.asarray(first)[:, None], np.asarray(rest)[:, : NEW - 1]], axis=1)

    return Outcome(whole(token, tokens), whole(first, logprobs), pos, weight)


def same(got: Outcome, want: Outcome, tolerance: float = 2e-4) -> None:
    """Assert that two outcomes are one: tokens and kept slots exactly, log-probabilities nearly."""
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=tolerance)
    for layer, (mine, theirs) in enumerate(zip(got.pos, want.pos, strict=True)):
        np.testing.assert_array_equal(mine, theirs, err_msg=f"positions kept in layer {layer}")
    for layer, (mine, theirs) in enumerate(zip(got.weight, want.weight, strict=True)):
        np.testing.assert_array_equal(mine, theirs, err_msg=f"weights in layer {layer}")
