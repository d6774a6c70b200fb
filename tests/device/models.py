"""Random models of the widths that the kernels are made for, and what one generation left behind."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, Params, init
from kvjax.policies import Policy
from kvjax.runtime.engine import Engine

SMALL = ModelConfig.uniform("llama", 97, 256, 512, 2, 8, 2, 64, 1024, RopeConfig(1e4, 64))
"""2 layers of 8 query heads on 2 KV heads of 64."""

PROMPTS = [np.random.default_rng(i).integers(0, 97, size).tolist() for i, size in enumerate((150, 3, 60, 33))]
"""Rows of a ragged batch: longer than the budget, much shorter, about as long."""

BUDGET, NEW = 48, 40

QUERIES = 16
"""Random queries by which attention over a cache's slots is compared."""

FITTED = 1e-3
"""Largest relative error of attention over slots that are fitted; one H100 was 8.7e-5 off in the weights."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of reading prompts and generating greedily.

    Attributes:
        tokens, logprobs: [B, NEW].
        pos, weight: of each layer [B, K, C], in order of position.
        attended: of each layer [B, K, QUERIES, H], what random queries get of its slots.
        layers: how many layers there are.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    pos: list[np.ndarray]
    weight: list[np.ndarray]
    attended: list[np.ndarray]


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
    pos, weight, attended = [], [], []
    for layer, cache in zip(engine.layers, state.caches, strict=True):
        slots = layer.view(cache)
        order = np.argsort(np.asarray(slots.pos), axis=-1, kind="stable")
        pos.append(np.take_along_axis(np.asarray(slots.pos), order, axis=-1))
        weight.append(np.take_along_axis(np.asarray(slots.weight), order, axis=-1))
        attended.append(attention(*(np.asarray(x, np.float64) for x in (slots.k, slots.v, slots.weight))))

    def whole(first: Any, rest: Any) -> np.ndarray:
        return np.concatenate([np.asarray(first)[:, None], np.asarray(rest)[:, : NEW - 1]], axis=1)

    return Outcome(whole(token, tokens), whole(first, logprobs), pos, weight, attended)


def attention(k: np.ndarray, v: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What random queries get of slots [B, K, C, H], each of which counts as often as its weight says."""
    queries = np.random.default_rng(1).normal(size=(QUERIES, k.shape[-1]))
    live = (weight > 0)[:, :, None]
    logits = np.einsum("qh,bkch->bkqc", queries, np.where(live[:, :, 0, :, None], k, 0)) / np.sqrt(k.shape[-1])
    logits = np.where(live, logits, -np.inf)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True)) * weight[:, :, None]
    return shares / shares.sum(axis=-1, keepdims=True) @ np.where(live[:, :, 0, :, None], v, 0)


def same(got: Outcome, want: Outcome, tolerance: float = 2e-4, *, fitted: bool = False) -> None:
    """Assert that two outcomes are one: tokens and kept slots exactly, log-probabilities nearly.

    Args:
        tolerance: of log-probabilities.
        fitted: whether weights and values are fitted by least squares, which amplifies the last bits of what they are fitted to. They are
            then compared by the attention that they give, to a relative error of `FITTED`.
    """
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=tolerance)
    for layer, (mine, theirs) in enumerate(zip(got.pos, want.pos, strict=True)):
        np.testing.assert_array_equal(mine, theirs, err_msg=f"positions kept in layer {layer}")
    for layer, (mine, theirs) in enumerate(zip(got.weight, want.weight, strict=True)):
        if fitted:
            mine, theirs = mine > 0, theirs > 0
        np.testing.assert_array_equal(mine, theirs, err_msg=f"weights in layer {layer}")
    for layer, (mine, theirs) in enumerate(zip(got.attended, want.attended, strict=True)) if fitted else ():
        error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
        assert error <= FITTED, f"attention in layer {layer}: relative error {error:.1e}"
