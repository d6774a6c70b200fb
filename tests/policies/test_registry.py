"""Policies by name: as people write them, and with a budget whether they have one or not."""

import dataclasses

import pytest

import kvjax
from kvjax.policies import (
    ChunkKV,
    Full,
    PolicyError,
    StreamingLLM,
    TreeKV,
    by_layer,
    get_policy,
    offloaded,
    policies,
    quantized,
    register,
)

PROMPT, OPTIONS = [[5, 9, 2, 7, 7, 1] * 9], {"max_new_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize("name", policies())
def test_case_and_hyphens_do_not_matter(name):
    cls = policies()[name]
    for written in (name, name.upper(), name.replace("_", "-").title(), cls.__name__):
        assert type(get_policy(written)) is cls


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("treekvv", "treekv"),
        ("Tree", "treekv"),
        ("STREAMING", "streaming_llm"),
        ("h20", "h2o"),
        ("snap-kvs", "snapkv"),
        ("duo", "duoattention"),
        ("chelsae", "chelsea"),
        ("ExpectedAttn", "expected_attention"),
        ("infinitygen", "infinigen"),
    ],
)
def test_near_misses_are_told(written, meant):
    with pytest.raises(PolicyError, match=rf"unknown policy '{written}'; known: adakv, .*Did you mean '{meant}'\?"):
        get_policy(written)


@pytest.mark.parametrize("written", ["", "zzz"])
def test_what_is_like_nothing_is_told_without_a_guess(written):
    with pytest.raises(PolicyError, match=r"unknown policy .*triattention, turboquant\.$"):
        get_policy(written)


@pytest.mark.parametrize("name", ["AAA", "zzz"])
def test_a_name_is_of_one_class(name):
    other = type(name, (Full,), {})
    with pytest.raises(PolicyError, match=rf"{name}.about.name = 'full' is empty or taken"):
        register(other)
    assert register(Full) is policies()["full"] is Full


def test_what_is_said_of_a_policy_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Full.about.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert len({cls.about for cls in policies().values()}) == len(policies())


@pytest.mark.parametrize("policy", ["full", "kivi", Full(), quantized(Full()), offloaded(Full())], ids=str)
def test_a_budget_is_taken_by_policies_that_have_none(policy):
    plain = get_policy(policy)
    assert get_policy(policy, budget=64) == get_policy(policy, budget=0.2) == plain
    with pytest.raises(PolicyError, match="budget=-3; give a positive"):
        get_policy(policy, budget=-3)


def test_a_budget_of_parts_is_not_ignored():
    """It bears on the parts, which have it already, so one for the whole is refused."""
    for policy in (by_layer([Full(), TreeKV()]), quantized(ChunkKV()), offloaded(StreamingLLM())):
        assert policy.info.takes_budget
        with pytest.raises(PolicyError, match="has no hyperparameter 'budget'"):
            get_policy(policy, budget=64)


def test_which_policies_have_a_budget():
    assert {name for name in policies() if not get_policy(name).info.takes_budget} == {"full", "kivi", "turboquant"}


@pytest.mark.parametrize(("policy", "applies"), [("full", False), ("KIVI", False), ("Streaming-LLM", True)])
def test_stats_say_whether_the_budget_applies(tiny, policy, applies):
    """One sweep over all of them needs no exception."""
    got, plain = (kvjax.generate(tiny, PROMPT, policy=policy, budget=budget, **OPTIONS)[0] for budget in (24, None))
    assert got.stats.budget_applies == plain.stats.budget_applies == applies
    assert applies or got.tokens == plain.tokens
