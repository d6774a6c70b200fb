"""Policies that score tokens, against their definitions; and the parts they share."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import oracle_scoring as oracle
from policies.driver import Case, kept, make_case, rotate, run
from policies.oracle_arrays import ROPE

from kvjax.cache import PromptKV
from kvjax.pallas_kernels import attention_mass
from kvjax.policies import H2O, TOVA, ExpectedAttention, KeyDiff, KNorm, Policy, PolicyError, Random, SnapKV
from kvjax.policies.budget import budget_tokens
from kvjax.policies.expected_attention import Queries
from kvjax.policies.families.noise import uniform
from kvjax.policies.families.scoring import pool

STEPS = 6


@functools.cache
def drawn(kv_heads: int, seed: int) -> np.ndarray:
    """What `Random` draws for the first 70 positions."""
    spec = dataclasses.replace(make_case(0, [1], 1).spec, num_kv_heads=kv_heads)
    return np.asarray(uniform(spec, seed, jnp.arange(70, dtype=jnp.int32)))


def random_with(kv_heads: int, seed: int) -> Callable[..., oracle.Row]:
    """The oracle of `Random`, which is told what that draws: when a test asks, not when tests are collected."""

    def row(*given: Any) -> oracle.Row:
        made = oracle.Random(*given)
        made.drawn = drawn(kv_heads, seed)
        return made

    return row


# Policy, its oracle with what it needs to be told, query heads, KV heads.
CASES = {
    "snapkv, GQA": (SnapKV(budget=16, window=4), oracle.SnapKV, {}, 4, 2),
    "snapkv, MHA, the class's defaults": (
        SnapKV(budget=19, window=3, pool="avg", kernel=5),
        oracle.SnapKV,
        {"window": 3, "pool": "avg", "kernel": 5},
        2,
        2,
    ),
    "snapkv, fraction": (SnapKV(budget=0.3, window=1, pool=None), oracle.SnapKV, {"window": 1, "pool": None}, 4, 2),
    "h2o, GQA": (H2O(budget=16), oracle.H2O, {}, 4, 2),
    "h2o, MHA, few recent": (H2O(budget=13, recent=2), oracle.H2O, {"recent": 2}, 2, 2),
    "h2o, last queries": (H2O(budget=16, observers="last", window=5), oracle.H2O, {"observers": 5}, 4, 2),
    "h2o, fraction": (H2O(budget=0.5, recent=0), oracle.H2O, {"recent": 0}, 4, 2),
    "tova, GQA": (TOVA(budget=14), oracle.TOVA, {}, 4, 2),
    "tova, MHA, newest kept": (TOVA(budget=9, keep_newest=True), oracle.TOVA, {"last": 1}, 2, 2),
    "knorm, GQA": (KNorm(budget=14, dense_layers=0), oracle.KNorm, {}, 4, 2),
    "knorm, MHA, fraction": (KNorm(budget=0.4, dense_layers=0), oracle.KNorm, {}, 3, 3),
    "keydiff, GQA": (KeyDiff(budget=14), oracle.KeyDiff, {}, 4, 2),
    "keydiff, MHA": (KeyDiff(budget=9), oracle.KeyDiff, {}, 3, 3),
    "random, GQA": (Random(budget=14, seed=3), random_with(2, 3), {}, 4, 2),
    "random, MHA, fraction": (Random(budget=0.4), random_with(3, 0), {}, 3, 3),
    "expected_attention, GQA": (
        ExpectedAttention(budget=18, sinks=2, future=8),
        oracle.ExpectedAttention,
        {},
        4,
        2,
    ),
    "expected_attention, MHA": (
        ExpectedAttention(budget=15, sinks=0, future=5, epsilon=0.0),
        oracle.ExpectedAttention,
        {"sinks": 0, "future": 5, "epsilon": 0.0},
        2,
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    """A ragged batch, prompts shorter and longer than the budget: what is kept and what is put out at every step."""
    policy, definition, told, heads, kv_heads = CASES[name]
    lengths = np.random.default_rng(len(name)).integers(3, 60, size=32)
    check(policy, definition, told, make_case(6, lengths, STEPS, heads, kv_heads))


def check(policy: Policy, definition: Callable[..., oracle.Row], told: dict, case) -> None:
    _, outputs, states = run(policy, case)
    held = [kept(policy, case, state) for state in states]
    for row, length in enumerate(case.lengths.tolist()):
        budget = budget_tokens(policy.budget, length + STEPS)
        size = length + STEPS
        literal = definition(case.q[row, :size], case.k[row, :size], case.v[row, :size], length, budget)
        vars(literal).update(told)
        assert held[0][row] == literal.prefill()
        for i in range(STEPS):
            np.testing.assert_allclose(outputs[i, row], literal.step(length + i), atol=2e-5)
            literal.evict()
            assert held[i + 1][row] == literal.kept()


# What they share.


@pytest.mark.parametrize(("kind", "width"), [("max", 7), ("avg", 5), ("max", 1)])
def test_pooling(kind, width):
    scores = np.random.default_rng(width).random((2, 3, 30)).astype(np.float32)
    got = np.asarray(pool(jnp.asarray(scores), width, kind))
    for row, values in np.ndindex(2, 3):
        np.testing.assert_allclose(got[row, values], oracle.pooled(scores[row, values], width, kind), rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_attention_mass_is_the_sum_of_causal_probabilities(sliding_window):
    """Over more than one block of queries, in rows of any length; of each row it sums to the number of its queries."""
    lengths = np.asarray([150, 64, 1, 65])
    case = make_case(3, lengths, 1)
    queries, keys = (
        np.asarray([[[rotate(ROPE, h, pos) for h in heads] for pos, heads in enumerate(row)] for row in x])
        for x in (case.q, case.k)
    )
    lengths = jnp.asarray(lengths, jnp.int32)
    prompt = PromptKV.of(ROPE, *(jnp.asarray(x) for x in (case.q, case.k, case.v)), lengths, lengths)
    got = attention_mass(prompt.q_rotated, prompt.k_rotated, lengths, scale=8**-0.5, sliding_window=sliding_window)
    pos = np.arange(150)
    distance = pos[:, None] - pos
    visible = (distance >= 0) & (distance < (sliding_window or 150))
    for row, length in enumerate(lengths):
        for head in range(2):
            group = queries[row, :150, 2 * head : 2 * head + 2]
            weights = np.exp(np.einsum("tgh,sh->gts", group, keys[row, :150, head]) / np.sqrt(8)) * visible
            probs = weights / weights.sum(axis=-1, keepdims=True)
            expected = probs[:, :length].sum(axis=1).mean(axis=0)
            np.testing.assert_allclose(got[row, head, :150], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(np.asarray(got)[row].sum(axis=-1), length, rtol=1e-5)


def test_statistics_of_two_blocks_are_those_of_the_whole():
    """Rows with tokens in both, in one of them and in none."""
    q = np.random.default_rng(3).normal(size=(4, 12, 2, 3)).astype(np.float32)
    first, last = np.asarray([7, 5, 0, 0]), np.asarray([5, 0, 4, 0])

    def inside(counts, size):
        return np.arange(size) < counts[:, None]

    @jax.jit
    def found(q, one, other):
        both = jnp.concatenate([one, other], axis=1)
        return Queries.of(q[:, :7], one).joined(Queries.of(q[:, 7:], other)), Queries.of(q, both)

    joined, whole = found(q, inside(first, 7), inside(last, 5))
    for name in ("count", "mean", "scatter"):
        np.testing.assert_allclose(getattr(joined, name), getattr(whole, name), atol=1e-5)
    np.testing.assert_allclose(whole.scatter[0, 1] / 12, np.cov(q[0, :, 1].T, bias=True), atol=1e-5)


# By hand, and errors.


def test_papers_defaults():
    """LongBench's configuration of SnapKV; H2O's 1024 heavy hitters and 1024 recent tokens."""
    assert (SnapKV().window, SnapKV().pool, SnapKV().kernel) == (32, "max", 7)
    assert H2O().always_kept(H2O().budget) == (0, 1024)


def test_heavy_hitters_by_hand():
    """H2O evicts one token per step, the least attended that is not recent, and forgets what it had."""
    policy = H2O(budget=4, recent=2)
    case = make_case(0, [4], steps=3, heads=1, kv_heads=1)
    case.q[:] = 0  # every query spreads its attention evenly: the earlier a token, the more it has got
    _, _, states = run(policy, case)
    assert [sorted(kept(policy, case, state)[0][0]) for state in states] == [
        [0, 1, 2, 3],
        [0, 1, 3, 4],
        [0, 1, 4, 5],
        [0, 1, 5, 6],
    ]


def test_tova_heads_share_the_choice_and_may_drop_the_newest():
    case = make_case(8, [40] * 16, STEPS)
    _, _, states = run(TOVA(budget=14), case)
    fates = [kept(TOVA(budget=14), case, state) for state in states]
    assert all(row[0] == row[1] for state in fates for row in state)
    dropped = [40 + i not in row[0] for i, state in enumerate(fates[1:]) for row in state]
    assert any(dropped)


def test_random_numbers_are_spread_evenly_and_differ():
    """By head, seed and layer; and of more positions the first ones are the same."""
    spec = make_case(0, [1], 1).spec
    pos = jnp.arange(4000, dtype=jnp.int32)
    numbers = np.asarray(uniform(spec, 0, pos))
    assert numbers.shape == (2, 4000)
    counts = np.stack([np.histogram(head, bins=10, range=(0, 1))[0] for head in numbers])
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)
    others = numbers[1], uniform(spec, 1, pos)[0], uniform(dataclasses.replace(spec, layer=1), 0, pos)[0]
    for other in others:
        assert abs(np.corrcoef(numbers[0], np.asarray(other))[0, 1]) < 0.1
    np.testing.assert_array_equal(uniform(spec, 0, pos[:70]), numbers[:, :70])


def test_knorm_spares_the_first_layers(tiny):
    """In the two layers that the paper spares, nothing is dropped, and memory is the full cache's."""
    assert KNorm().dense_layers == 2
    case = make_case(2, [40, 3], STEPS)
    policy = KNorm(budget=8, dense_layers=1)
    assert kept(policy, case, run(policy, case)[0]) == [[set(range(46))] * 2, [set(range(9))] * 2]
    sizes = [KNorm(budget=100, dense_layers=n).nbytes(tiny.config, 1, 2000, 10) for n in (0, 1, 2)]
    assert sizes[1] == (sizes[0] + sizes[2]) / 2
    assert sizes[0] < sizes[2] / 15


def test_published_defaults_of_expected_attention():
    policy = ExpectedAttention()
    assert (policy.sinks, policy.future, policy.epsilon) == (4, 512, 0.02)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SnapKV(budget=31), "31 slots, but the policy always keeps the last 32 tokens"),
        (lambda: SnapKV(kernel=4), "kernel=4 is even. Give an odd width"),
        (lambda: SnapKV(window=0), "window=0 is too small. Give 1"),
        (lambda: SnapKV(pool="sum"), "pool='sum' is unknown. Give one of 'max', 'avg'"),
        (lambda: H2O(budget=4, recent=4), "need 5"),
        (lambda: H2O(observers="some"), "'all', 'last'"),
        (lambda: H2O(recent=-1), "recent=-1"),
        (lambda: TOVA(budget=0), "budget=0"),
        (lambda: KNorm(dense_layers=-1), "dense_layers=-1"),
        (lambda: ExpectedAttention(budget=3), "keeps the first 4 tokens"),
        (lambda: ExpectedAttention(future=0), "future=0"),
        (lambda: TOVA(budget=0.01).validate(60), "gives 0 slots"),
    ],
)
def test_bad_hyperparameters(make, says):
    with pytest.raises(PolicyError, match=says):
        make()


# Equal scores.


@pytest.mark.parametrize("budget", [1, 2])
def test_keydiffs_two_candidates_are_equally_unlike_their_mean(budget):
    """With a budget of 1 the latest goes at every step, whatever rounding says, so that the prompt's best stays."""
    case = make_case(11, [50, 3, 16, 17] * 8, STEPS)
    _, _, states = run(KeyDiff(budget=budget), case)
    held = [kept(KeyDiff(budget=budget), case, state) for state in states]
    assert (held[-1] == held[0]) == (budget == 1)


@pytest.mark.parametrize(
    "policy", [KNorm(budget=8, dense_layers=0), ExpectedAttention(budget=8)], ids=lambda p: p.info.name
)
def test_a_repeated_token_is_kept_where_it_came_first(policy):
    """Keys and values of one norm, but for rounding: the first 8 of the prompt, and no later ones but what is always kept."""
    case = make_case(12, [40, 31], STEPS)
    one = case.rows(slice(0, 1))
    noise = 1 + 1e-7 * np.random.default_rng(0).standard_normal((2, 46, 1, 1)).astype(np.float32)
    q, k, v = (np.broadcast_to(x[:, :1], (2, *x.shape[1:])) * noise for x in (one.q, one.k, one.v))
    same = Case(0 * q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), case.lengths, STEPS)
    for state in run(policy, same)[2][:1]:
        assert kept(policy, same, state) == [[set(range(8))] * 2] * 2


@dataclasses.dataclass(frozen=True)
class H2OInRounds(H2O):
    every: int = 4


@dataclasses.dataclass(frozen=True)
class KNormInRounds(KNorm):
    every: int = 4


@pytest.mark.parametrize("budget", [12, 0.4])
def test_a_policy_with_a_field_every_evicts_in_rounds(budget):
    """A head is cut to its budget by the `every`-th token beyond it, in the prompt and after, and not before."""
    case = make_case(5, [30, 3, 13, 16], steps=11)
    policy = KNormInRounds(budget=budget, dense_layers=0)
    _, _, states = run(policy, case)
    for row, length in enumerate(case.lengths):
        slots = budget_tokens(budget, int(length) + case.spec.new_tokens, 1)
        for head in range(case.k.shape[2]):
            norms = np.linalg.norm(case.k[row, :, head], axis=-1)
            held = list(range(length))
            for i, state in enumerate(states):
                held += [length + i - 1] if i else []
                if len(held) >= slots + policy.every:
                    held = sorted(sorted(held, key=lambda at: norms[at])[:slots])
                assert kept(policy, case, state)[row][head] == set(held), (row, head, i)


def test_rounds_of_one_token_are_eviction_with_every_token():
    case = make_case(6, [30, 3, 13, 16], steps=9)
    for one, other in zip(run(H2OInRounds(budget=12, every=1), case)[2], run(H2O(budget=12), case)[2], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_heavy_hitters_in_rounds_are_the_most_attended_since_they_came():
    """Right after a round, what goes scores no more than what stays, but for the latest tokens."""
    case = make_case(7, [30, 20], steps=12)
    policy = H2OInRounds(budget=12, recent=4)
    _, _, states = run(policy, case)
    rounds = 0
    for before, after in itertools.pairwise(states):
        for row, head in np.ndindex(2, 2):
            had, has = kept(policy, case, before)[row][head], kept(policy, case, after)[row][head]
            if len(has) >= len(had):
                continue
            rounds += 1
            assert len(has) == 12
            newest = int(after.cache.seen[row])
            assert set(range(newest - 4, newest)) <= has
            pairs = zip(after.cache.pos[row, head].tolist(), after.score[row, head].tolist(), strict=True)
            scores = dict(zip(before.cache.pos[row, head].tolist(), before.score[row, head].tolist(), strict=True))
            stays = {at: score for at, score in pairs if at in had and at < newest - 4}
            # The last query adds at most 1 to a score, and scores only grow.
            assert max(scores[at] for at in had - has) <= min(stays.values()) + 1e-6
            assert all(stays[at] >= scores[at] for at in stays)
    assert rounds


def test_scores_that_follow_queries_have_blocks_read_token_by_token():
    class Sums(KNorm):
        def update_score(self, spec, score, probs, held):
            return score + probs

    class WithBlocks(Sums):
        def block_scores(self, spec, prompt, score):
            return score

    spec = make_case(8, [12], steps=1).spec
    reads = [cls(budget=8, dense_layers=0).layer(spec).reads for cls in (KNorm, Sums, WithBlocks)]
    assert reads == ["blocks", "tokens", "blocks"]
