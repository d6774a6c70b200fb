"""The invariants in which a model takes part, of every policy, with layers that have windows among those that it compresses."""

import dataclasses

import jax
import numpy as np
import pytest
from policies import test_invariants as plain
from policies.driver import TINY, as_if_alone, each

import kvjax
from kvjax.cache import layer_specs
from kvjax.config import ModelConfig
from kvjax.models import Params, init
from kvjax.policies import Policy
from kvjax.policies.families.ring import RingLayer


def windowed(config: ModelConfig, *windows: int | None) -> ModelConfig:
    """The model with its layer repeated, with these windows."""
    layer = config.layers[0]
    mixers = (dataclasses.replace(layer.mixer, window=window) for window in windows)
    return dataclasses.replace(config, layers=tuple(dataclasses.replace(layer, mixer=mixer) for mixer in mixers))


@pytest.fixture(scope="module")
def tiny(tiny: Params) -> Params:
    """A random model whose second and last layers are those that policies are bound to, between windows of 8 and 24."""
    found = init(windowed(TINY, 8, None, 24, None), jax.random.key(5))
    assert found.config.for_policy == tiny.config == TINY
    return found


def of(policy: Policy, params: Params) -> Policy:
    """The policy for all layers."""
    bound = policy.for_model(params.config)
    specs = layer_specs(params.config, 1, 54, 12, params.dtype)
    assert [isinstance(bound.layer(spec), RingLayer) for spec in specs] == [True, False, True, False]
    return bound


@each(plain.AMPLE)
def test_ample_budget_is_the_full_cache(policy: Policy, tiny: Params) -> None:
    plain.test_ample_budget_is_the_full_cache(of(policy, tiny), tiny)


@pytest.mark.slow
@each(plain.TIGHT)
def test_rows_are_independent(policy: Policy, tiny: Params) -> None:
    fits = policy.info.refits_values
    as_if_alone(tiny, plain.PROMPTS, policy=of(policy, tiny), atol=1e-4 if fits else 2e-5, **plain.GREEDY)


@pytest.mark.slow
@each(plain.TIGHT)
def test_cache_is_donated(policy: Policy, tiny: Params) -> None:
    plain.test_cache_is_donated(of(policy, tiny), tiny)


@pytest.mark.slow
@each(plain.TIGHT)
def test_compiler_agrees_on_bytes(policy: Policy, tiny: Params) -> None:
    plain.test_compiler_agrees_on_bytes(of(policy, tiny), tiny)


@pytest.mark.slow
@each(plain.TIGHT)
def test_state_round_trips(policy: Policy, tiny: Params, tmp_path) -> None:
    plain.test_state_round_trips(of(policy, tiny), tiny, tmp_path)


@pytest.mark.slow
@each([policy for policy in plain.TIGHT if not policy.info.transform])
def test_one_block_is_the_prompt(policy: Policy, tiny: Params) -> None:
    """Chunked prefill with one block keeps and answers what a whole prompt does, with those policies that have it."""
    bound = of(policy, tiny)
    specs = layer_specs(tiny.config, 1, 54, 12, tiny.dtype, block=64)
    if any(bound.layer(spec).reads != "blocks" for spec in specs):
        pytest.skip("chunked prefill of whole blocks is not supported")
    whole, block = (
        kvjax.generate(tiny, plain.PROMPTS[0], policy=bound, prefill_block=size, **plain.GREEDY) for size in (None, 64)
    )
    assert whole.tokens == block.tokens
    np.testing.assert_allclose(whole.logprobs, block.logprobs, atol=2e-5)
