"""The cache that a generation ended with: what it holds, and that a continuation is what one longer generation is."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from policies.driver import compositions, each, every_policy, offloads

import kvjax
from kvjax.models import Params
from kvjax.policies import H2O, Policy, PolicyError, SnapKV, by_head

PROMPTS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((48, 20, 33))]
OPTIONS: dict[str, Any] = {"ignore_eos": True, "return_state": True}


UNPLANNED = [p for p in every_policy(24) + compositions(24) if p.info.name != "rocketkv"]
"""Policies that do not depend on the planned length if the budget is in tokens. RocketKV splits its ratio by that length."""


@pytest.mark.rotating  # as tests/policies/test_invariants.py, which continues from saved states of each policy
@each(UNPLANNED, later=True)
def test_a_continuation_is_a_longer_generation(policy: Policy, tiny: Params):
    """Budgets in tokens, so that the length that was planned does not matter."""
    results: Any = kvjax.generate(tiny, PROMPTS, policy, max_new_tokens=8, room=16, rows=2, **OPTIONS)
    longer: Any = kvjax.generate(tiny, PROMPTS, policy, max_new_tokens=20, room=4, rows=2, **OPTIONS)
    for prompt, result, want in zip(PROMPTS, results, longer, strict=True):
        state = result.state
        assert state.tokens == [*prompt, *result.tokens[:-1]]
        assert state.next_token == result.tokens[-1]
        more = state.generate(tiny, 12, ignore_eos=True)
        assert result.tokens + more.tokens == want.tokens
        np.testing.assert_allclose(result.logprobs + more.logprobs, want.logprobs, atol=2e-5)
        assert more.state.tokens == want.state.tokens
        assert more.state.room == want.state.room
        for mine, whole in zip(more.state.positions, want.state.positions, strict=True):
            np.testing.assert_array_equal(mine, whole)


def test_it_has_what_is_kept(tiny):
    result: Any = kvjax.generate(tiny, PROMPTS[0], "h2o", 24, max_new_tokens=8, **OPTIONS)
    state = result.state
    engine = kvjax.Engine(tiny, "h2o", 24, prompt_len=48, max_new_tokens=8)
    decoding, _ = engine.prefill([PROMPTS[0]])
    decoding, *_ = engine.decode(decoding, 7)
    for mine, slots, scores, count in zip(
        state.positions, engine.slots(decoding), state.scores, state.counts, strict=True
    ):
        np.testing.assert_array_equal(np.sort(mine), np.sort(np.asarray(slots.pos)[0]))
        assert count.tolist() == [24, 24]
        assert (scores[mine >= 0] > 0).all()
    assert "h2o, 55 tokens processed, 24 to 24 kept per head" in repr(state)
    assert state.caches[0].cache.k.shape[0] == 1
    assert isinstance(state.caches[0].cache.k, np.ndarray)
    assert kvjax.generate(tiny, PROMPTS[0], "full", max_new_tokens=2).state is None


def test_scores_of_every_kind_of_state(tiny):
    """CaM's attention mass; and of `by_head`, those of the heads that have some."""
    mass: Any = kvjax.generate(tiny, PROMPTS[0], "cam", 24, max_new_tokens=4, **OPTIONS)
    for positions, scores, cached in zip(mass.state.positions, mass.state.scores, mass.state.caches, strict=True):
        np.testing.assert_array_equal(scores, cached.mass[0])
        assert (scores[positions >= 0] > 0).all()
    policy = by_head({"a": H2O(budget=24), "b": SnapKV(budget=40)}, [["b", "a"], ["b", "b"]])
    mixed: Any = kvjax.generate(tiny, PROMPTS[0], policy, max_new_tokens=4, **OPTIONS)
    (first, second), positions = mixed.state.scores, mixed.state.positions[0]
    assert second is None
    assert first.shape == positions.shape
    assert np.isnan(first[0]).all()
    assert (first[1][positions[1] >= 0] > 0).all()


def test_questions_and_given_tokens(tiny):
    """A question is processed token by token, and so are tokens that are given to a continuation."""
    question, again = [5, 9, 2], [7, 1]
    results: Any = kvjax.generate(
        tiny, PROMPTS, "snapkv", 40, max_new_tokens=6, question=[question] * 3, room=16, **OPTIONS
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        state = result.state
        assert state.tokens == [*prompt, *question, *result.tokens[:-1]]
        more = state.generate(tiny, 4, again, ignore_eos=True)
        asked = [*question, *result.tokens, *again]
        want: Any = kvjax.generate(tiny, prompt, "snapkv", 40, max_new_tokens=4, question=asked, ignore_eos=True)
        assert more.tokens == want.tokens
        assert more.stop_reason == "length"


def test_text_is_given_as_its_tokens(letters):
    result: Any = kvjax.generate(letters, PROMPTS[1], "treekv", 24, max_new_tokens=8, room=16, **OPTIONS)
    want = result.state.generate(letters, 4, letters.tokenizer.encode("abc"), ignore_eos=True)
    more = result.state.generate(letters, 4, "abc", ignore_eos=True)
    assert (more.tokens, more.state.tokens) == (want.tokens, want.state.tokens)
    assert more.state.tokens[-7:-3] == [result.tokens[-1], 0, 1, 2]


def test_an_end_token_is_not_in_the_cache(tiny):
    plain: Any = kvjax.generate(tiny, PROMPTS[0], "treekv", 24, max_new_tokens=8, **OPTIONS)
    end = plain.tokens[3]
    ending = tiny.replace(config=dataclasses.replace(tiny.config, eos=(end,)))
    result: Any = kvjax.generate(ending, PROMPTS[0], "treekv", 24, max_new_tokens=8, return_state=True)
    first = plain.tokens.index(end)
    assert result.stop_reason == "eos"
    assert result.state.tokens == [*PROMPTS[0], *plain.tokens[:first]]
    assert result.state.next_token == end


def test_results_arrive_with_their_states(tiny):
    found = dict(kvjax.iterate(tiny, PROMPTS, "treekv", 24, max_new_tokens=[3, 5, 2], rows=1, **OPTIONS))
    assert {i: len(result.state.tokens) for i, result in found.items()} == {0: 50, 1: 24, 2: 34}


def test_what_does_not_go_is_refused(tiny, letters):
    with pytest.raises(ValueError, match=r"stop=\['ab'\], since the cache has tokens beyond a stop string"):
        kvjax.generate(letters, "abc", stop="ab", **OPTIONS)
    with pytest.raises(PolicyError, match="host"):
        kvjax.generate(tiny, PROMPTS[0], offloads(24)[0], **OPTIONS)
    with pytest.raises(ValueError, match="room=4 is for states; give return_state=True"):
        kvjax.generate(tiny, PROMPTS[0], room=4)
    result: Any = kvjax.generate(tiny, PROMPTS[0], "full", max_new_tokens=4, **OPTIONS)
    state = result.state
    with pytest.raises(
        ValueError,
        match=rf"1 given and 100 new tokens need room for 100 tokens, but this state has room for {state.room}",
    ):
        state.generate(tiny, 100)
    with pytest.raises(ValueError, match="stop strings are not supported here"):
        state.generate(letters, 2, stop="a")
    with pytest.raises(ValueError, match=r"given row.*99"):
        state.generate(tiny, 2, [99])


def test_sampling_continues_with_its_seed(tiny):
    """Samples depend on the seed and the position, so that a continuation is the rest of the longer text."""
    how: dict[str, Any] = {"temperature": 1.5, "seed": 11}
    result: Any = kvjax.generate(tiny, PROMPTS[1], "treekv", 24, max_new_tokens=5, room=10, **how, **OPTIONS)
    want: Any = kvjax.generate(tiny, PROMPTS[1], "treekv", 24, max_new_tokens=12, ignore_eos=True, **how)
    more = result.state.generate(tiny, 7, ignore_eos=True, **how)
    assert result.tokens + more.tokens == want.tokens
    assert jax.tree.all(jax.tree.map(lambda x: isinstance(x, np.ndarray), more.state.caches))


def test_prompts_that_are_read_in_blocks(tiny):
    how: dict[str, Any] = {"prefill_block": 16, "room": 16}
    result: Any = kvjax.generate(tiny, PROMPTS[0], "treekv", 24, max_new_tokens=5, **how, **OPTIONS)
    want: Any = kvjax.generate(tiny, PROMPTS[0], "treekv", 24, max_new_tokens=9, **how, **OPTIONS)
    more = result.state.generate(tiny, 4, ignore_eos=True)
    assert result.tokens + more.tokens == want.tokens
