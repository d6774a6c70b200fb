"""Hyperparameters: a policy given no more than a budget is its method as published, and the least that is allowed is allowed."""

import dataclasses

import jax.numpy as jnp
import pytest
from policies.facts import all_facts

from kvjax.policies import H2O, PolicyError, get_policy, policies, pyramid
from kvjax.policies.budget import SHORT
from kvjax.policies.transforms.pyramid import Pyramid

PUBLISHED = {name: facts.published for name, facts in all_facts().items() if facts.published}
LEAST = {name: facts.least for name, facts in all_facts().items()}
BUDGETS = [(name, options, least) for name, facts in all_facts().items() for options, least in facts.budgets]


def test_every_method_with_hyperparameters_is_there() -> None:
    ours = {name: cls for name, cls in policies().items() if cls.__module__.startswith("kvjax.")}
    fields = {name: {field.name for field in dataclasses.fields(cls)} for name, cls in ours.items()}
    assert {name for name in ours if fields[name] - {"budget", "seed"}} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    policy = get_policy(name)
    assert {field: getattr(policy, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_pyramid_is_as_steep_as_pyramidkv() -> None:
    assert pyramid(get_policy("snapkv")) == pyramid(get_policy("snapkv"), beta=20) == Pyramid(get_policy("snapkv"))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in LEAST for field in LEAST[name]])
def test_the_least_is_allowed_and_less_is_not(name: str, field: str) -> None:
    least = LEAST[name][field]
    assert getattr(get_policy(name, **{field: least}), field) == least
    with pytest.raises(PolicyError, match=f"{field}={least - 1}"):
        get_policy(name, **{field: least - 1})


@pytest.mark.parametrize(("name", "options", "least"), BUDGETS)
def test_the_least_budget(name: str, options: dict[str, int], least: int) -> None:
    """As a number of tokens, and as a share of a text that is not short: a shorter one gets what is needed."""
    assert get_policy(name, budget=least, **options).budget == least
    with pytest.raises(PolicyError, match=f"budget.*{least - 1}"):
        get_policy(name, budget=least - 1, **options)
    tokens = SHORT * least
    get_policy(name, budget=least / tokens, **options).validate(tokens)
    too_small = get_policy(name, budget=(least - 0.5) / tokens, **options)
    too_small.validate(tokens - 1)
    with pytest.raises(PolicyError, match="budget of 0"):
        too_small.validate(tokens)


def test_recent_tokens_of_h2o() -> None:
    """Half of each row's budget, or as many as are asked for."""
    budgets = jnp.asarray([8, 21], jnp.int32)
    assert [x.tolist() for x in H2O().always_kept(budgets)] == [[0, 0], [4, 10]]
    assert [x.tolist() for x in H2O(recent=3).always_kept(budgets)] == [[0, 0], [3, 3]]
