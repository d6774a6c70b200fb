"""`Engine.score`: it is what `generate` reports, and its derivatives are slopes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import compositions, each, every_policy

import kvjax
from kvjax.models import Params
from kvjax.pallas_kernels.top_k import keys, reference
from kvjax.policies import Policy, PolicyError
from kvjax.runtime.decoding import padded

PROMPTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((30, 21))]
STEPS = 3

WITHOUT = {"chelsea", "attention_matching"}
"""Those that say that they have no gradient."""

POLICIES = [
    p for p in every_policy(16) + compositions(16) if p.info.name not in WITHOUT and p.info.memory != "quantized"
]
"""Those that have a gradient which is the slope. Rounded keys and values have a slope of zero or a jump."""


def engine_for(policy: Policy | str, params: Params, budget: int | None = None) -> kvjax.Engine:
    return kvjax.Engine(params, policy, budget, batch=2, prompt_len=30, max_new_tokens=STEPS)


def following(policy: Policy | str, params: Params, budget: int | None = None) -> tuple[Any, Any]:
    """Greedy tokens and their log-probabilities."""
    found: Any = kvjax.generate(params, PROMPTS, policy, budget, max_new_tokens=STEPS, ignore_eos=True)
    return np.asarray([row.tokens for row in found], np.int32), np.asarray([row.logprobs for row in found])


@pytest.mark.parametrize("policy", ["full", "treekv", "snapkv"])
def test_it_is_what_generate_reports(policy, tiny):
    budget = None if policy == "full" else 40
    tokens, want = following(policy, tiny, budget)
    got = jax.jit(engine_for(policy, tiny, budget).score)(tiny, *padded(PROMPTS), tokens)
    np.testing.assert_allclose(got, want, atol=2e-5)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """The library computes in float64 wherever it does in float32. Scores are ordered by their bits as float32."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        float32 = jnp.float32

        def as_float32(scores: jax.Array) -> jax.Array:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(jnp, "float32", float32)
                return keys.ordered(scores)

        patch.setattr(jnp, "float32", jnp.float64)
        patch.setattr(reference, "ordered", as_float32)
        yield


def check_slope(policy: Policy, params: Params) -> None:
    """The derivative of the score in a random direction of the weights is the slope.

    Differences are taken in float64, over a step so small that nothing is chosen differently.
    """
    tokens = np.random.default_rng(9).integers(0, 64, (len(PROMPTS), STEPS)).astype(np.int32)
    with in_float64():
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        engine, given = engine_for(policy, params), (*padded(PROMPTS), tokens)
        random = np.random.default_rng(0)
        way = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) * np.std(x)), params)

        @jax.jit
        @jax.value_and_grad
        def scored(step: Any) -> jax.Array:
            return jnp.sum(engine.score(jax.tree.map(lambda x, to: x + step * to, params, way), *given))

        (less, _), (_, slope), (more, _) = (map(float, scored(step)) for step in (-1e-6, 0.0, 1e-6))
    assert abs(slope) > 0.01
    np.testing.assert_allclose(slope, (more - less) / 2e-6, rtol=1e-5)


@pytest.mark.rotating  # policies/test_gradients.py compares those of each policy's layer with slopes, in every run
@each(POLICIES, later=True)
def test_gradients_are_slopes(policy, tiny):
    """Through prefill and three steps, at a budget that drops tokens."""
    check_slope(policy, tiny)


@pytest.mark.parametrize(
    "text", ["streaming_llm:16,sinks=2", pytest.param("kvzip:16,chunk=8,plus=true", marks=pytest.mark.slow)]
)
def test_a_gradient_is_a_slope(text, tiny):
    """Values of padding have a norm of zero."""
    check_slope(kvjax.get_policy(text).bind(tiny.config), tiny)


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_those_without_a_gradient_say_so(name, tiny):
    policy = next(p for p in every_policy(16) if p.info.name == name)
    engine, tokens = engine_for(policy, tiny), np.zeros((2, STEPS), np.int32)
    with pytest.raises(PolicyError, match=rf"{name}: .* no gradient"):
        jax.eval_shape(jax.grad(lambda params: jnp.sum(engine.score(params, *padded(PROMPTS), tokens))), tiny)


def test_lists_are_taken_as_arrays(tiny):
    engine = engine_for("full", tiny)
    tokens, lengths = padded(PROMPTS)
    shapes = jax.eval_shape(lambda params: engine.score(params, tokens.tolist(), lengths.tolist(), [[5, 9]] * 2), tiny)
    assert shapes.shape == (2, 2)


def test_what_does_not_fit_is_refused(tiny):
    engine = engine_for("full", tiny)
    with pytest.raises(ValueError, match=r"following \[2, 9\]; give 2 rows of 1 to 3 tokens"):
        engine.score(tiny, *padded(PROMPTS), np.zeros((2, 9), np.int32))
    with pytest.raises(ValueError, match=r"tokens \[1, 64\] and lengths \[1\]; give 2 prompts of up to 64 places each"):
        engine.score(tiny, *padded(PROMPTS[:1]), np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"tokens \[3\] and lengths \[1\]; give 2 prompts"):
        engine.score(tiny, [5, 9, 2], [3], [[1]])
    blocked = kvjax.Engine(tiny, "full", batch=2, prompt_len=30, max_new_tokens=STEPS, block=16)
    with pytest.raises(ValueError, match="make an engine without mesh and block"):
        blocked.score(tiny, *padded(PROMPTS), np.zeros((2, 3), np.int32))
