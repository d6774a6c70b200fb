"""Short rows, alone or beside long ones: they stay whole within what their budgets and policies ask for, and are refused by none."""

import dataclasses

import jax
import numpy as np
import pytest
from policies.driver import TINY, compiled, in_tier, make_case, run
from policies.surrogates import model_inputs

import kvjax
from kvjax.policies import Policy, PolicyError, get_policy, policies
from kvjax.policies.budget import budget_tokens

LENGTHS = [120, 1, 2, 3, 5, 8, 40]
NEW = 8
SHARE = 0.25

COMBINED = {
    "recompress": "recompress(snapkv:{}; every=64)",
    "thresholded": "thresholded(knorm:{},dense_layers=0; threshold=-1000000; window=16)",
    "chunks": "chunkkv(snapkv:{})",
    "critical": "critical(snapkv:{})",
    "prompt_only": "prompt_only(h2o:{})",
    "quantized": "quantized(snapkv:{}; group=4)",
    "offloaded": "offloaded(quest:{},dense_layers=0)",
    "by_layer": "by_layer(streaming_llm:{0}; snapkv:{0})",
    "by_head": "by_head(a=streaming_llm:{0}; b=snapkv:{0}; profile=(('a', 'b'), ('a', 'b')))",
    "pyramid": "pyramid(snapkv:{})",
}


def made(name: str, budget: int | float) -> Policy:
    """A policy as published, but that no layer is left as it is, or a transform."""
    if name in COMBINED:
        return get_policy(COMBINED[name].format(budget)).bind(TINY)
    cls = policies()[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    options = {"budget": budget, "dense_layers": 0, "group": 4, "exact_layers": 0, **model_inputs(cls, TINY)}
    if name == "triattention" and isinstance(budget, int):  # which the window as published would not fit
        options["window"] = 16
    return get_policy(name, **{key: value for key, value in options.items() if key in fields}).bind(TINY)


def kept(policy: Policy, case) -> list[list[list[int]]]:
    """Positions that each head of each row holds after the prompt."""
    prefill, _ = compiled(policy, case.spec)
    size = case.spec.prompt_len
    arrays = (
        np.pad(x, ((0, 0), (0, max(size - x.shape[1], 0)), (0, 0), (0, 0)))[:, :size] for x in (case.q, case.k, case.v)
    )
    slots = policy.layer(case.spec).view(prefill(*arrays, case.lengths))
    return [
        [sorted(pos[weight > 0].tolist()) for pos, weight in zip(*row, strict=True)]
        for row in zip(np.asarray(slots.pos), np.asarray(slots.weight), strict=True)
    ]


@pytest.mark.rotating  # those of the default tier run for every commit
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=in_tier(COMBINED.get(name, name), often=True)) for name in (*policies(), *COMBINED)],
)
def test_short_rows_beside_a_long_one_stay_whole(name):
    """At a quarter: those that are no longer than the budget, and those that are no longer than what the policy needs."""
    policy = made(name, SHARE)
    least = getattr(policies().get(name), "least_slots", None)
    for length in LENGTHS:
        policy.validate(length + NEW)
    for length, heads in zip(LENGTHS, kept(policy, make_case(3, LENGTHS, NEW)), strict=True):
        needed = 0 if least is None else policy.least_slots
        if length <= budget_tokens(SHARE, length + NEW, needed):
            assert heads == [list(range(length))] * 2, length


@pytest.mark.rotating
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(SHARE, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.long),
        pytest.param(0.9, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", [*policies(), *COMBINED])
def test_short_rows_are_what_they_are_alone(name, budget):
    """To what they hold, and to the outputs of the first steps."""
    policy, case = made(name, budget), make_case(7, LENGTHS, 3)
    together, (_, outputs, _) = kept(policy, case), run(policy, case)
    for i, length in enumerate(LENGTHS):
        alone = case.rows(slice(i, i + 1))
        assert together[i] == kept(policy, alone)[0]
        np.testing.assert_allclose(outputs[:, i], run(policy, alone)[1][:, 0], atol=1e-4)
        if length <= budget_tokens(budget, length + 3):
            assert together[i] == [list(range(length))] * 2, length
    jax.clear_caches()


def test_budgets_that_cover_a_row_have_all_of_it_read():
    """Also where others of the batch are longer than the budget: as the row would be alone, when the layer keeps to no selection at all."""
    case = make_case(7, [200, 30], 3)
    for policy in (
        get_policy("infinigen:100,dense_layers=0,profile=prompt,alpha=0.1"),
        get_policy("quest:79,dense_layers=0"),
    ):
        _, outputs, _ = run(policy, case)
        _, alone, _ = run(policy, case.rows(slice(1, 2)))
        np.testing.assert_allclose(outputs[:, 1], alone[:, 0], atol=1e-4)


@pytest.mark.parametrize("policy", ["snapkv", "treekv"])
def test_a_batch_of_long_and_short_prompts(tiny, policy):
    """At a budget that is fewer slots than the policy needs of the short ones: each gets what it gets alone; the shortest, the full cache's."""
    prompts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (150, 4, 1)]
    together = kvjax.generate(tiny, prompts, policy, SHARE, max_new_tokens=8)
    for prompt, row in zip(prompts, together, strict=True):
        alone = kvjax.generate(tiny, prompt, policy, SHARE, max_new_tokens=8)
        assert row.tokens == alone.tokens
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=2e-5)
    if policy == "snapkv":  # keeps its window of 32 tokens, and new ones
        full = kvjax.generate(tiny, prompts, max_new_tokens=8)
        assert [row.tokens for row in together[1:]] == [row.tokens for row in full[1:]]


@pytest.mark.parametrize("name", sorted(name for name, cls in policies().items() if hasattr(cls, "budget")))
def test_fractions_from_an_eighth_on_suit_any_length(name):
    for budget in (0.125, 0.25, 1.0):
        policy = made(name, budget)
        for tokens in range(1, 3000):
            policy.validate(tokens)


def test_a_fraction_that_gives_a_long_prompt_too_little_is_refused(tiny):
    with pytest.raises(
        PolicyError,
        match=r"^prompts 1 and 3 of 3: snapkv: a budget of 0.01 gives 3 slots, but the policy always keeps the last 32 tokens",
    ):
        kvjax.generate(tiny, [[1] * 300, [1, 2, 3], [1] * 300], "snapkv", 0.01, max_new_tokens=4)
