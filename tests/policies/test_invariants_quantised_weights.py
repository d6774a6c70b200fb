"""The invariants in which a model takes part, of every policy, with weights in 8 and 4 bits. (The others see no weights.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import test_invariants as plain

import kvjax
from kvjax.conversion import quantize_weights
from kvjax.models import Params
from kvjax.pallas_kernels import is_quantized
from kvjax.policies import Policy

FEW = {"treekv", "infinigen"}
"""A policy does not see weights, but for InfiniGen's queries ahead: so these are slow tests, and the others long ones."""


def each(policies: list[Policy]) -> pytest.MarkDecorator:
    """One test for every policy."""
    marks = {True: pytest.mark.slow, False: pytest.mark.long}
    named = [(policy.info.name or type(policy).__name__, policy) for policy in policies]
    params = [pytest.param(policy, id=name, marks=marks[name in FEW]) for name, policy in named]
    return pytest.mark.parametrize("policy", params)


@pytest.fixture(scope="module")
def tiny(tiny: Params) -> Params:
    """The random model, its first layer and its tables in 8 bits, its second layer in 4."""
    eight, four = (quantize_weights(tiny, kind, "int8") for kind in ("int8", "int4"))
    mixed = dataclasses.replace(eight, layers=(eight.layers[0], four.layers[1]))
    kinds = {w.kind for w in jax.tree.leaves(mixed, is_leaf=is_quantized) if is_quantized(w)}
    assert kinds == {"int8", "int4"}
    return mixed


@each(plain.AMPLE)
def test_ample_budget_is_the_full_cache(policy: Policy, tiny: Params) -> None:
    plain.test_ample_budget_is_the_full_cache(policy, tiny)


@pytest.mark.slow
def test_the_full_cache_is_that_of_the_numbers(tiny: Params) -> None:
    floats = jax.tree.map(lambda w: w.dequantized(jnp.float32) if is_quantized(w) else w, tiny, is_leaf=is_quantized)
    found, expected = (kvjax.generate(params, plain.PROMPTS, **plain.GREEDY) for params in (tiny, floats))
    for got, want in zip(found, expected, strict=True):
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


@each(plain.TIGHT)
def test_equal_policies_share_one_program(policy: Policy, tiny: Params) -> None:
    plain.test_equal_policies_share_one_program(policy, tiny)


@each(plain.TIGHT)
def test_cache_is_donated(policy: Policy, tiny: Params) -> None:
    plain.test_cache_is_donated(policy, tiny)


@each(plain.TIGHT)
def test_steps_copy_no_cache(policy: Policy, tiny: Params) -> None:
    plain.test_steps_copy_no_cache(policy, tiny)


@each(plain.TIGHT)
def test_rows_are_independent(policy: Policy, tiny: Params) -> None:
    plain.test_rows_are_independent(policy, tiny)


@each(plain.TIGHT)
def test_compiler_agrees_on_bytes(policy: Policy, tiny: Params) -> None:
    plain.test_compiler_agrees_on_bytes(policy, tiny)


@each(plain.TIGHT)
def test_state_round_trips(policy: Policy, tiny: Params, tmp_path) -> None:
    plain.test_state_round_trips(policy, tiny, tmp_path)
