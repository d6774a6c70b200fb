"""LagKV against the literal algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import oracle_lagkv as oracle
from policies.driver import make_case, run
from policies.oracle_arrays import ROPE, rotate
from policies.oracle_chunkkv import attend
from policies.slots import after_prompt, kept

from kvjax.cache import PromptKV
from kvjax.policies import LagKV, PolicyError


def prompt(k, v) -> PromptKV:
    """A prompt of one row with one head: keys and values [1, T, 1, H]."""
    length = jnp.asarray([k.shape[1]], jnp.int32)
    return PromptKV.of(ROPE, k, k, v, length, length)


def scored(policy: LagKV, k, v) -> np.ndarray:
    """Scores of a prompt's tokens."""
    k, v = (np.asarray(x, np.float32)[None, :, None] for x in (k, v))
    return np.asarray(jax.jit(lambda k, v: policy.scores(make_case(0, [1], 1).spec, prompt(k, v)))(k, v))[0, 0]


def keep(policy: LagKV, scores) -> list[int]:
    """What the policy keeps of one prompt with these scores."""
    length, budget = (np.asarray([x], np.int32) for x in (len(scores), policy.budget))
    mask = jax.jit(policy.keep_mask)(np.asarray(scores, np.float32)[None, None], length, budget)
    return np.flatnonzero(np.asarray(mask)[0, 0]).tolist()


# The cases worked out by hand.


def test_scores_by_hand():
    """Token 0 lies at the minimum in all channels, token 1 half-way in four of eight: √(8 · ¼² / 7) = 0.267. Keys say nothing."""
    values = [[0.0] * 8, [1.0, 0.0] * 4, [0.0] * 8, [2.0] * 8]
    odds = np.exp(np.sqrt(0.5 / 7))
    expected = 0.5 + np.asarray([1, odds]) / (1 + odds)
    np.testing.assert_allclose(scored(LagKV(sinks=0, lag=2), np.zeros((4, 8)), values)[:2], expected, rtol=1e-6)


def test_what_never_changes_says_nothing():
    """Segments of one repeated token: equal scores, and none is NaN."""
    np.testing.assert_allclose(scored(LagKV(sinks=0, lag=4), np.zeros((12, 8)), np.ones((12, 8)))[:8], 0.5)


def test_segments_share_the_budget_evenly():
    """1 sink, segments 1 to 3, 4 to 6, 7 to 9, and 10 to 11 left at the end; 6 are kept in any case, of 3 more slots one is unused."""
    scores = [0.0, 7, 8, 9, 1, 3, 2, 0, 0, 0, 0, 0]
    always = [0, 7, 8, 9, 10, 11]
    assert keep(LagKV(budget=9, sinks=1, lag=3), scores) == sorted([3, 5, *always])
    assert keep(LagKV(budget=8, sinks=1, lag=3), scores) == sorted([3, 5, *always])
    assert keep(LagKV(budget=7, sinks=1, lag=3), scores) == always
    assert keep(LagKV(budget=10, sinks=1, lag=3), scores) == sorted([2, 3, 5, 6, *always])
    assert keep(LagKV(budget=12, sinks=1, lag=3), scores) == list(range(12))


def test_equal_tokens_are_taken_from_the_left():
    assert keep(LagKV(budget=8, sinks=1, lag=3), np.ones(12)) == [0, 1, 4, 7, 8, 9, 10, 11]


def test_a_budget_below_what_is_always_kept():
    """The sinks and the latest tokens, as in the published code."""
    assert keep(LagKV(budget=5, sinks=1, lag=3), np.ones(12)) == [0, 8, 9, 10, 11]
    assert keep(LagKV(budget=5, sinks=2, lag=30), np.ones(12)) == [0, 1, 9, 10, 11]


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 24, "sinks": 2, "lag": 6}, 4, 2),
    "mha, no sinks": ({"budget": 21, "sinks": 0, "lag": 5}, 2, 2),
    "mqa, short segments": ({"budget": 27, "sinks": 3, "lag": 3}, 4, 1),
    "long segments": ({"budget": 33, "sinks": 1, "lag": 14}, 4, 2),
    "budget often below what is always kept": ({"budget": 15, "sinks": 4, "lag": 10}, 4, 2),
    "segments above the budget": ({"budget": 12, "sinks": 2, "lag": 16}, 2, 2),
    "fraction": ({"budget": 0.6, "sinks": 2, "lag": 6}, 4, 2),
}
STEPS = 6


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens, their keys' order, outputs of every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy, group = LagKV(**options), heads // kv_heads
    lengths = np.random.default_rng(len(name)).integers(1, 64, size=32)
    case = make_case(6, lengths, STEPS, heads, kv_heads)
    _, outputs, states = jax.device_get(run(policy, case, padding=np.nan))
    for row, length in enumerate(lengths.tolist()):
        keys, values = case.k[row], case.v[row].astype(np.float64)
        turned = rotate(ROPE, keys[:length], np.arange(length)[:, None])
        budget = policy.budget if isinstance(policy.budget, int) else int((length + STEPS) * policy.budget)
        held = [
            oracle.survivors(turned[:, head], values[:length, head], budget, policy.sinks, policy.lag)
            for head in range(kv_heads)
        ]
        for i, state in enumerate(states):
            pos, live = state.pos[row], state.weight[row] > 0
            for head in range(kv_heads):
                assert pos[head][live[head]].tolist() == [*held[head], *range(length, length + i)]
        for i, n in np.ndindex(STEPS, heads):
            at, head = length + i, n // group
            positions = [*held[head], *range(length, at + 1)]
            out = attend(case.q[row, at, n], case.k[row, :, head], case.v[row, :, head], positions, at)
            np.testing.assert_allclose(outputs[i, row, n], out, atol=2e-5)


@pytest.mark.parametrize(("sinks", "lag", "budget"), [(2, 6, 40), (0, 4, 30), (5, 13, 50)])
def test_every_scored_segment_keeps_as_many(sinks, lag, budget):
    policy = LagKV(budget=budget, sinks=sinks, lag=lag)
    lengths = np.random.default_rng(lag).integers(budget + 1, 120, size=32)
    case = make_case(lag, lengths, steps=1)
    for length, heads in zip(lengths, kept(policy, case, after_prompt(policy, case)), strict=True):
        whole = (length - sinks) // lag
        for tokens in heads:
            counts = {len(tokens & set(range(sinks + i * lag, sinks + (i + 1) * lag))) for i in range(whole - 1)}
            assert len(counts) == 1
            assert budget - (whole - 1) < len(tokens) <= budget
            assert {*range(sinks), *range(sinks + (whole - 1) * lag, length)} <= tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lag": 1}, "lag=1 is too small. Give 2 or more"),
        ({"sinks": -1}, "sinks=-1 is too small. Give 0 or more"),
        ({"budget": 16}, "gives 16 slots, but the policy always keeps the first 16 tokens and the last token\\."),
        ({"budget": 0}, "budget=0"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        LagKV(**options)
