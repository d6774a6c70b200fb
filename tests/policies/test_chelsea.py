"""Chelsea against the literal algorithm."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import Case, kept, make_case, run
from policies.oracle_chelsea import ChelseaHead, count_edges, ratio

from kvjax.cache import TokenBlock
from kvjax.pallas_kernels import Clusters
from kvjax.policies import Chelsea, Full, PolicyError, chelsea
from kvjax.policies.budget import budget_tokens
from kvjax.policies.chelsea import SCHEDULES
from kvjax.policies.families import soft_matching

# The worked example: four keys in one chunk. Edges lead from the first to the second (.8) and from the third to the second (.96).
FOUR = [(1, 0), (0.8, 0.6), (0.6, 0.8), (0, 1)]


def clusters(keys, weights=None) -> Clusters:
    """One head's tokens, with values like the keys."""
    k = jnp.asarray(keys, jnp.float32)[None, None]
    places = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    weight = jnp.ones(k.shape[:3], jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)[None, None]
    return Clusters(k, k, jnp.where(weight > 0, places, -1), weight)


def merge(tokens: Clusters, size: int, count: int, chunk: int) -> tuple[list, list, list]:
    """Live keys, weights and positions after one step."""
    held = int(jnp.sum(tokens.weight > 0))
    after = MERGE(tokens, *(jnp.asarray([x], jnp.int32) for x in (0, held, size, count)), chunk)
    np.testing.assert_array_equal(after.k, after.v)
    k, weight, pos = (np.asarray(x[0, 0])[: held - count] for x in (after.k, after.weight, after.pos))
    return np.round(k, 4).tolist(), weight.tolist(), pos.tolist()


MERGE = jax.jit(soft_matching.merge, static_argnums=5)


@pytest.mark.parametrize(
    ("count", "keys", "weights", "pos"),
    [
        (0, FOUR, [1, 1, 1, 1], [0, 1, 2, 3]),
        (1, [(1, 0), (0.7, 0.7), (0, 1)], [1, 2, 1], [0, 2, 3]),
        (2, [(0.8, 0.4667), (0, 1)], [3, 1], [2, 3]),
    ],
)
def test_merges_of_the_worked_example(count, keys, weights, pos):
    got = merge(clusters(FOUR), 4, count, 4)
    np.testing.assert_allclose(got[0], keys, atol=1e-4)
    assert got[1:] == (weights, pos)


def test_merging_clusters_gives_the_mean_of_all_tokens():
    got = merge(clusters([(0.8, 0.466667), (0, 1)], weights=[3, 1]), 2, 1, 2)
    np.testing.assert_allclose(got[0], [(0.6, 0.6)], atol=1e-4)
    assert got[1:] == ([4], [1])


def test_equal_edges_are_kept_from_the_left():
    same = [(1, 0)] * 6
    assert merge(clusters(same), 6, 2, 2)[1:] == ([2, 2, 1, 1], [1, 3, 4, 5])
    assert merge(clusters(same), 6, 2, 6)[1:] == ([3, 1, 1, 1], [2, 3, 4, 5])


def test_a_token_alone_in_its_chunk_has_no_edge():
    assert count_edges(5, 4) == 2
    assert merge(clusters([(1, 0)] * 8, weights=[1] * 5 + [0] * 3), 5, 2, 4)[1:] == ([3, 1, 1], [2, 3, 4])


def test_tokens_beyond_the_middle_stay():
    keys = [(1, 0), (1, 0), (1, 0), (1, 0)]
    assert merge(clusters(keys), 2, 1, 4)[1:] == ([2, 1, 1], [1, 2, 3])


def test_edges_by_positions_lead_to_the_nearest():
    """Two heads, 7 places in chunks of 4, from the second place on: of each even place the nearest odd one, and how far it is."""
    pos = np.asarray([[[0, 3, 9, 4, 8, 20, 21], [5, 50, 51, 57, 60, 61, 70]]], np.int32)
    nearness, target = jax.jit(soft_matching.near, static_argnums=3)(
        pos, *(np.asarray([n], np.int32) for n in (1, 5)), 4
    )
    assert np.asarray(nearness).tolist() == [[[[-5, -4], [-np.inf] * 2], [[-1, -3], [-np.inf] * 2]]]
    assert np.asarray(target)[0, :, 0].tolist() == [[1, 1], [0, 1]]


def test_clusters_are_put_into_the_order_of_the_text():
    pos = np.asarray([[[4, 2, 9, 0, 1], [7, 8, 3, 0, 1]]], np.int32)
    weight = np.arange(10, dtype=np.float32).reshape(1, 2, 5)
    tokens = Clusters(weight[..., None], -weight[..., None], pos, weight)
    k, v, pos, weight = map(np.asarray, jax.jit(soft_matching.in_text_order)(tokens, np.asarray([3], np.int32)))
    assert pos[0, :, :3].tolist() == [[2, 4, 9], [3, 7, 8]], "the first three, in both heads"
    assert weight[0, :, :3].tolist() == [[1, 0, 2], [7, 5, 6]]
    np.testing.assert_array_equal(k[..., 0], weight)
    np.testing.assert_array_equal(v[..., 0], -weight)


def test_number_of_edges():
    sizes = jnp.arange(70, dtype=jnp.int32)
    for chunk in (2, 3, 4, 5, 8, 70):
        assert soft_matching.edges(sizes, chunk).tolist() == [count_edges(s, chunk) for s in range(70)]


def steps_to_budget(tokens: int, new: int, budget: float, schedule: str, r_min: float) -> tuple[int, int]:
    """Steps until a prompt is within its budget, and tokens that are then left."""
    goal, steps = budget_tokens(budget, tokens + new), 0
    while tokens > goal:
        middle = tokens - 16 - 64
        count = min(int(ratio(SCHEDULES[schedule], r_min, steps) * middle), middle // 2, tokens - goal)
        if count == 0:
            break
        tokens, steps = tokens - count, steps + 1
    return steps, tokens


@pytest.mark.parametrize(("schedule", "steps"), [("llama-2", 4), ("llama-3", 8), ("qwen", 27)])
def test_steps_of_the_papers_schedules(schedule, steps):
    """32768 tokens to 20 %: what the rule gives, and what the policy's own counting gives."""
    assert steps_to_budget(32768, 1000, 0.2, schedule, 0.05) == (steps, 6753)
    assert chelsea._usual(Chelsea(schedule=schedule), 32768, 32768, 6753, 0) == steps


def test_without_a_floor_qwens_schedule_stalls():
    assert steps_to_budget(32768, 1000, 0.2, "qwen", 0.0)[1] == 23616
    with pytest.raises(PolicyError, match="Raise r_min"):
        Chelsea(schedule="qwen", r_min=0.0)


CONFIGURATIONS = {
    "gqa": ({"budget": 24, "sinks": 2, "recent": 5, "chunk": 4, "every": 5}, 4, 2),
    "mha": ({"budget": 17, "sinks": 1, "recent": 4, "chunk": 6, "every": 3, "schedule": "llama-2"}, 2, 2),
    "mqa, clustering after each token": ({"budget": 20, "sinks": 3, "recent": 6, "chunk": 8, "every": 1}, 4, 1),
    "no chunks": ({"budget": 21, "sinks": 2, "recent": 5, "chunk": None, "every": 4, "schedule": "constant"}, 2, 1),
    "odd chunks": ({"budget": 15, "sinks": 0, "recent": 0, "chunk": 5, "every": 4, "schedule": "qwen"}, 2, 1),
    "regions larger than the budget": ({"budget": 10, "chunk": 7, "every": 6}, 2, 1),
    "fraction": ({"budget": 0.3, "sinks": 2, "recent": 3, "chunk": 4, "every": 2, "r_init": 0.5, "alpha": 0.1}, 2, 1),
}


SHORT = {"budget": 24, "sinks": 2, "recent": 0.25, "chunk": 6, "every": 5}

CONFIGURATIONS |= {
    "recent by share, matched before rotation": (SHORT | {"match": "unrotated"}, 2, 1),
    "matched and merged before rotation": (SHORT | {"match": "unrotated", "merge": "unrotated"}, 2, 1),
    "merged before rotation": (SHORT | {"merge": "unrotated"}, 2, 1),
    "by positions": (SHORT | {"match": "positions"}, 2, 1),
    "halves": (SHORT | {"partition": "halves"}, 2, 1),
    "random, before rotation": (SHORT | {"partition": "random", "match": "unrotated", "merge": "unrotated"}, 2, 1),
}

FAST = {"matched and merged before rotation", "gqa", "mqa, clustering after each token", "odd chunks"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CONFIGURATIONS]
)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: slots after each step, and outputs."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = Chelsea(**options)
    lengths = np.random.default_rng(7).integers(1, 60, size=32)
    case = make_case(3, lengths, steps=20, heads=heads, kv_heads=kv_heads)
    _, outputs, states = run(policy, case)
    group = heads // kv_heads
    held = [jax.tree.map(np.asarray, state) for state in states]
    for row, length in enumerate(lengths):
        for head in range(kv_heads):
            oracle = oracle_of(policy, int(length) + case.steps)
            queries = case.q[row, :, head * group : (head + 1) * group]
            keys, values = case.k[row, :, head], case.v[row, :, head]
            oracle.prefill(keys[:length], values[:length])
            compare(held[0], row, head, oracle)
            for i in range(case.steps):
                pos = int(length) + i
                out = oracle.step(queries[pos], keys[pos], values[pos], pos)
                np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-5)
                compare(held[i + 1], row, head, oracle)


def oracle_of(policy: Chelsea, tokens: int) -> ChelseaHead:
    given = (policy.r_init, policy.alpha, policy.steps)
    schedule = tuple(a if a is not None else b for a, b in zip(given, SCHEDULES[policy.schedule], strict=True))
    budget = budget_tokens(policy.budget, tokens)
    regions = policy.sinks, policy.recent, policy.chunk, policy.every
    options = {"match": policy.match, "merge": policy.merge, "partition": policy.partition}
    return ChelseaHead(budget, *regions, schedule, policy.r_min, **options)


def compare(state, row: int, head: int, oracle: ChelseaHead, atol: float = 2e-5) -> None:
    """The slots of one head are the oracle's entries, in order."""
    slots, count = state.cache, len(oracle.entries)
    free = slots.pos.shape[-1] - count
    assert slots.pos[row, head].tolist() == [e["pos"] for e in oracle.entries] + [-1] * free
    assert slots.weight[row, head].tolist() == [e["n"] for e in oracle.entries] + [0] * free
    for name in "kv":
        expected = np.stack([e[name] for e in oracle.entries])
        np.testing.assert_allclose(getattr(slots, name)[row, head, :count], expected, atol=atol)
    assert state.steps[row] == oracle.steps


def assert_same(got, expected, atol: float = 2e-5) -> None:
    """Two states, but for what their free slots hold."""
    np.testing.assert_array_equal(got.steps, expected.steps)
    live = np.asarray(expected.cache.live)
    for name in ("pos", "weight", "next", "seen"):
        np.testing.assert_array_equal(getattr(got.cache, name), getattr(expected.cache, name))
    for name in "kv":
        np.testing.assert_allclose(
            np.asarray(getattr(got.cache, name))[live], np.asarray(getattr(expected.cache, name))[live], atol=atol
        )


@pytest.mark.slow
@pytest.mark.parametrize("budget", [50, 60])
def test_the_gpus_bodies_cluster_alike(monkeypatch, budget):
    """Of a prompt an odd and an even number of steps, then while decoding; a row is shorter than what is never merged."""
    policy = Chelsea(budget=budget, sinks=2, recent=4, chunk=32, every=8)
    case = make_case(12, [100, 1, 70], steps=18, heads=2, kv_heads=1, dim=16)
    expected = run(policy, case)[2]
    assert (np.asarray(expected[-1].steps) > np.asarray(expected[0].steps)).any()
    for module, name in (
        (soft_matching, "chunk_similarity"),
        (soft_matching, "merge_clusters"),
        (chelsea, "copy_clusters"),
    ):
        monkeypatch.setattr(module, name, partial(getattr(module, name), implementation="gpu", interpret=True))
    # Another policy with the same ratios, so that nothing is reused.
    states = run(dataclasses.replace(policy, r_min=policy.r_min + 1e-6), case)[2]
    for got, want in zip(states, expected, strict=True):
        assert_same(got, want)


def test_usual_steps_of_the_case_above():
    assert {
        chelsea._usual(Chelsea(budget=b, chunk=32, every=8, sinks=2, recent=4), 128, 100, b, 0) % 2 for b in (50, 60)
    } == {0, 1}


def test_cases_are_what_they_are_meant_to_be():
    """The random cases above do cluster, repeatedly, and have rows that never do."""
    options, heads, kv_heads = CONFIGURATIONS["gqa"]
    lengths = np.random.default_rng(7).integers(1, 60, size=32)
    state, _, _ = run(Chelsea(**options), make_case(3, lengths, steps=20, heads=heads, kv_heads=kv_heads))
    assert (np.asarray(state.steps) == 0).any()
    assert (np.asarray(state.steps) > 4).any()
    assert np.asarray(state.cache.weight).max() > 4


LARGE = Chelsea(budget=6, sinks=1, recent=2, chunk=16, every=6, schedule="constant", r_init=0.5)


def large_case() -> Case:
    """A row of some hundred tokens and one of thousands, which end as a few clusters."""
    return make_case(13, [300, 2200], steps=7, heads=2, kv_heads=1)


def test_clusters_of_hundreds_and_thousands_equal_the_literal_algorithm():
    """Every token is counted: weights are exact. (Rotations in float32 are not, at positions of thousands.)"""
    case, atol = large_case(), 3e-4
    _, outputs, states = run(LARGE, case)
    held = [jax.tree.map(np.asarray, state) for state in states]
    for row, length in enumerate(case.lengths):
        oracle = oracle_of(LARGE, int(length) + case.steps)
        oracle.prefill(case.k[row, :length, 0], case.v[row, :length, 0])
        compare(held[0], row, 0, oracle, atol)
        for i in range(case.steps):
            pos = int(length) + i
            out = oracle.step(case.q[row, pos], case.k[row, pos, 0], case.v[row, pos, 0], pos)
            np.testing.assert_allclose(outputs[i, row], out, atol=atol)
            compare(held[i + 1], row, 0, oracle, atol)
    at = case.lengths[:, None] + np.arange(LARGE.every)  # until it is time to cluster again
    piece = [np.take_along_axis(x, at[..., None, None], axis=1) for x in (case.q, case.k, case.v)]
    count = jnp.full(2, LARGE.every, jnp.int32)
    block = TokenBlock(*piece, case.lengths, count, case.lengths + case.steps, case.spec.rope)
    at_once, _, _ = jax.jit(LARGE.layer(case.spec).read_block)(states[0], block, {})
    np.testing.assert_allclose(at_once, outputs.swapaxes(0, 1)[:, : LARGE.every], atol=2e-5)
    few, many = held[-1].cache.weight.max(axis=(1, 2))
    assert 64 < few < 300
    assert 1024 < many < 2200


SMALL = {"sinks": 2, "recent": 4, "chunk": 8, "every": 3}
TIGHT = Chelsea(budget=14, **SMALL)


def small_case(seed: int) -> Case:
    """Always of these lengths, so that tests share compiled programs."""
    return make_case(seed, [50, 9, 31], steps=20)


def test_sums_are_invariant():
    """Degrees sum to the tokens seen, and degree-weighted values to all values, at every step."""
    case = small_case(5)
    for step, state in enumerate(run(TIGHT, case)[2]):
        weight, v = (np.asarray(x, np.float64) for x in (state.cache.weight, state.cache.v))
        for row, length in enumerate(case.lengths):
            seen = length + step
            assert weight[row].sum(axis=-1).tolist() == [seen] * 2
            total = np.einsum("kc,kch->kh", weight[row], v[row])
            np.testing.assert_allclose(total, case.v[row, :seen].sum(axis=0, dtype=np.float64), atol=1e-4)


def test_clusters_every_so_many_tokens_down_to_exactly_the_budget():
    counts = np.asarray([np.asarray(s.cache.count)[:, 0] for s in run(TIGHT, small_case(9))[2]])
    assert counts[:, 0].tolist() == [14, 15, 16] * 7
    assert counts[:, 1].tolist() == [9, 10, 11, 12, 13] + [14, 15, 16] * 5 + [14]  # rows keep their own time


@pytest.mark.parametrize("most", [0, *(pytest.param(most, marks=pytest.mark.slow) for most in (1, 2))])
def test_steps_taken_for_granted_do_not_matter(most, monkeypatch):
    """Rows that need more steps than their prompt's length lets expect get them one by one."""
    expected = run(TIGHT, small_case(9))[2]
    monkeypatch.setattr(chelsea, "MAX_PLANNED_STEPS", most)
    another = dataclasses.replace(
        TIGHT, r_min=TIGHT.r_min + 1e-6 * (1 + most)
    )  # the same ratios, and nothing that is reused
    got = run(another, small_case(9))[2]
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other, atol=0)


def test_sinks_and_recent_tokens_are_never_merged():
    for step, state in enumerate(run(TIGHT, small_case(10))[2]):
        pos, weight = np.asarray(state.cache.pos)[0, 0], np.asarray(state.cache.weight)[0, 0]
        alone = set(pos[weight == 1].tolist())
        assert {0, 1, *range(46 + step, 50 + step)} <= alone


def test_clusters_of_equal_keys_attend_like_their_tokens():
    """Equal keys and arbitrary values: the output is the full cache's, however few slots are left."""
    random = np.random.default_rng(2)
    case = make_case(2, [40, 23], steps=12)
    # Unrotated positions, so that equal keys stay equal; in runs of ten, which chunks of five divide.
    k = np.repeat(random.normal(size=(2, 6, 2, 8)), 10, axis=1)[:, :52].astype(np.float32)
    still = StillCase(case.q, k, case.v, case.lengths, case.steps)
    policy = Chelsea(budget=16, sinks=0, recent=0, chunk=10, every=4)
    state, outputs, _ = run(policy, still)
    assert np.asarray(state.cache.count).max() < 20
    np.testing.assert_allclose(outputs, run(Full(), still)[1], atol=2e-5)


class StillCase(Case):
    """The same inputs without rotation."""

    @property
    def spec(self):
        rope = dataclasses.replace(super().spec.rope, inv_freq=(0.0,) * 4)
        return dataclasses.replace(super().spec, rope=rope)


def test_nothing_is_merged_within_the_budget():
    """Weights of 1 are vanilla attention."""
    state, outputs, _ = run(Chelsea(budget=1.0, **SMALL), small_case(12))
    assert set(np.unique(np.asarray(state.cache.weight))) == {0.0, 1.0}
    np.testing.assert_allclose(outputs, run(Full(), small_case(12))[1], atol=1e-6)


@pytest.mark.slow
def test_error_falls_with_budget():
    case = small_case(12)
    full = run(Full(), case)[1]
    budgets = (0.125, 0.25, 0.5, 1.0)
    errors = [float(np.abs(run(Chelsea(budget=budget, **SMALL), case)[1] - full).mean()) for budget in budgets]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_fractional_budget_is_each_rows_own():
    policy = Chelsea(budget=0.5, **SMALL)
    case = small_case(12)
    state, _, _ = run(policy, case)
    assert state.budget.tolist() == [35, 14, 25]
    counts = np.asarray([[len(head) for head in row] for row in kept(policy, case, state)])
    assert ((counts >= [[35], [14], [25]]) & (counts < [[38], [17], [28]])).all()


def test_a_fraction_of_nothing_is_one_slot():
    policy = Chelsea(budget=0.01, every=1)
    case = make_case(2, [6], steps=3)
    state, _, _ = run(policy, case)
    assert np.asarray(state.cache.weight)[0, 0, :2].tolist() == [9, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget=0"),
        ({"budget": 1.5}, "fraction"),
        ({"sinks": -1}, "sinks=-1"),
        ({"chunk": 1}, "chunk=1"),
        ({"every": 0}, "every=0"),
        ({"schedule": "llama"}, "'llama-2', 'llama-3', 'qwen', 'constant'"),
        (
            {"r_init": 0.6},
            r"ratios from 0\.6 to 0\.\d+ are not valid, because a step removes more than 0 and at most 0\.5",
        ),
        ({"r_min": 0.0, "r_init": 0.2, "alpha": 0.1, "steps": 2}, "more than 0"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        Chelsea(**options)
