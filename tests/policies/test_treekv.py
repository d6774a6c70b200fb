"""TreeKV against the literal algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import kept, make_case, run
from policies.oracle_treekv import TreeHead, surviving_blocks, trace

from kvjax.cache import Token
from kvjax.policies import PolicyError, TreeKV

BARE = {"sinks": 0, "recent": 0}


def drive(policy: TreeKV, tokens: int, attention) -> tuple[list[int], list[int]]:
    """Stream tokens (numbered from 1) through a one-head tree; `attention(token, held)` gives each held token's share.

    Returns the evicted tokens in order, and those left.
    """
    case = make_case(0, [1], tokens, heads=1, kv_heads=1)
    layer = policy.layer(case.spec)
    state = layer.init()
    append, compress = jax.jit(layer.append), jax.jit(layer.compress)
    vector, evicted = jnp.zeros((1, 1, 8)), []
    for token in range(1, tokens + 1):
        new = Token(vector, vector, vector, jnp.asarray([token], jnp.int32), case.spec.rope)
        state = append(state, new)
        live = np.asarray(state.cache.live)[0, 0]
        held, rank = np.asarray(state.cache.pos)[0, 0], np.asarray(state.rank)[0, 0]
        shares = np.zeros(len(held), np.float32)
        shares[live] = np.asarray(attention(token, held[live], rank[live]))
        before = set(held[live].tolist())
        state = compress(state.replace(score=state.score + shares, steps=state.steps + live.astype(np.float32)))
        after = np.asarray(state.cache.pos)[0, 0][np.asarray(state.cache.live)[0, 0]]
        evicted += sorted(before - set(after.tolist()))
    return evicted, sorted(after.tolist())


def fixed(score):
    return lambda token, held, rank: [score(int(t)) for t in held]


TRACES = {
    "ties": ({}, lambda t: 1.0, [1, 3, 5, 7, 2, 6, 9, 11, 4, 10, 13, 15, 8], [12, 14, 16, 17]),
    "keep left": ({"keep": "left"}, lambda t: 1.0, [2, 4, 6, 8, 3, 7, 10, 12, 5, 11, 14, 16, 9], [1, 13, 15, 17]),
    "moving scores": (
        {},
        lambda t: (3.0, 1.0, 2.0)[t % 3],
        [1, 4, 5, 7, 2, 8, 10, 11, 3, 9, 13, 16, 6],
        [12, 14, 15, 17],
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_of_the_paper(name):
    options, score, evicted, left = TRACES[name]
    assert trace(17, 4, score, options.get("keep", "score"))[:2] == (evicted, left)
    assert drive(TreeKV(budget=4, **BARE, **options), 17, fixed(score)) == (evicted, left)


@pytest.mark.parametrize(("steps", "left"), [(8, [2, 4, 6, 8]), (12, [4, 8, 10, 12]), (16, [8, 12, 14, 16])])
def test_ties_after_full_turns(steps, left):
    assert drive(TreeKV(budget=4, **BARE), steps, fixed(lambda t: 1.0))[1] == left


def test_printed_cycle():
    policy = TreeKV(budget=4, **BARE, cycle="printed")
    evicted, left = drive(policy, 17, fixed(lambda t: 1.0))
    assert left == [13, 15, 16, 17]
    assert (evicted, left) == trace(17, 4, lambda t: 1.0, cycle="printed")[:2]


def test_scores_are_averages():
    rows = {1: [1], 2: [0.5, 0.5], 3: [0.25, 0.25, 0.5], 4: [0.125, 0.125, 0.75], 5: [0.125, 0.125, 0.75]}
    evicted, left = drive(TreeKV(budget=2, **BARE), 5, lambda token, held, rank: [rows[token][r] for r in rank])
    assert (evicted, left) == ([2, 3, 1], [4, 5])


def test_blocks_of_algorithms_note():
    assert surviving_blocks([5, 1, 2, 4, 3, 9], 4)[0] == [0, 3, 4, 5]
    assert closed_form(TreeKV())([[5, 1, 2, 4, 3, 9]], 4, 6) == [([0, 3, 4, 5], 3)]


def closed_form(policy):
    tournament = jax.jit(policy._tournament)

    def survivors(scores, capacity, blocks, scope=0):
        heads = np.ones(len(scores), np.int32)
        left, moved = tournament(np.asarray(scores, np.float32), np.int32(capacity), blocks * heads, scope * heads)
        return [(np.flatnonzero(row).tolist(), int(at) + 1) for row, at in zip(np.asarray(left), moved, strict=True)]

    return survivors


@pytest.mark.parametrize("options", [{}, {"keep": "left"}, {"cycle": "printed"}])
def test_closed_form_equals_one_by_one(options):
    """20 000 random trees: few score values, so that ties are common."""
    survivors, random = closed_form(TreeKV(**options)), np.random.default_rng(1)
    size, heads = 40, 100
    for _ in range(200):
        capacity, blocks = int(random.integers(0, 14)), int(random.integers(1, size + 1))
        scope = int(random.integers(0, max(capacity, 1)))
        scores = random.integers(0, 6, size=(heads, size)).astype(np.float32)
        expected = [surviving_blocks(list(row[:blocks]), capacity, scope=scope + 1, **options) for row in scores]
        assert survivors(scores, capacity, blocks, scope) == expected


CONFIGURATIONS = {
    "gqa": ({"budget": 24, "sinks": 2, "recent": 9, "block": 4}, 4, 2),
    "mha": ({"budget": 17, "sinks": 1, "recent": 5, "block": 3}, 2, 2),
    "mqa, default regions": ({"budget": 20, "sinks": 3, "block": 5}, 4, 1),
    "bare": ({"budget": 12, "sinks": 0, "recent": 0, "block": 4}, 2, 1),
    "keep left": ({"budget": 16, "sinks": 2, "recent": 4, "block": 2, "keep": "left"}, 2, 1),
    "printed cycle": ({"budget": 16, "sinks": 2, "recent": 4, "block": 2, "cycle": "printed"}, 2, 1),
    "budget below a block": ({"budget": 6, "sinks": 1, "recent": 2, "block": 16}, 2, 1),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens after each step, outputs, averages."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = TreeKV(**options)
    lengths = np.random.default_rng(7).integers(1, 60, size=32)
    case = make_case(3, lengths, steps=20, heads=heads, kv_heads=kv_heads)
    _, outputs, states = run(policy, case)
    recent = options.get("recent", options["budget"] // 2 - options["sinks"])
    group = heads // kv_heads
    held = [kept(policy, case, state) for state in states]
    for row, length in enumerate(lengths):
        for head in range(kv_heads):
            oracle = TreeHead(policy.budget, policy.sinks, recent, policy.keep, policy.cycle)
            queries = case.q[row, :, head * group : (head + 1) * group]
            keys, values = case.k[row, :, head], case.v[row, :, head]
            oracle.prefill(queries[:length], keys[:length], values[:length], policy.block)
            assert held[0][row][head] == {e["pos"] for e in oracle.entries}
            for i in range(case.steps):
                pos = length + i
                out = oracle.step(queries[pos], keys[pos], values[pos], pos)
                np.testing.assert_allclose(outputs[i, row, head * group : (head + 1) * group], out, atol=2e-5)
                assert held[i + 1][row][head] == {e["pos"] for e in oracle.entries}


def test_state_knows_order_and_averages():
    policy = TreeKV(budget=12, sinks=2, recent=3, block=2)
    case = make_case(5, [30, 4], steps=15)
    state, _, _ = run(policy, case)
    oracle = TreeHead(12, 2, 3)
    oracle.prefill(case.q[0, :30, :2], case.k[0, :30, 0], case.v[0, :30, 0], 2)
    for i in range(15):
        oracle.step(case.q[0, 30 + i, :2], case.k[0, 30 + i, 0], case.v[0, 30 + i, 0], 30 + i)
    order = np.argsort(np.asarray(state.rank)[0, 0])[:12]
    assert np.asarray(state.cache.pos)[0, 0][order].tolist() == [e["pos"] for e in oracle.entries]
    average = (np.asarray(state.score) / np.maximum(np.asarray(state.steps), 1))[0, 0][order]
    np.testing.assert_allclose(average, [e["S"] / e["C"] for e in oracle.entries], rtol=1e-4)


def test_the_papers_regions():
    """1024 = 4 sinks + 512 tree + 508 recent, both for a prompt and for its hand-over to decoding."""
    recent, tree, budget = TreeKV().regions(jnp.asarray([5000], jnp.int32))
    assert (recent.item(), tree.item(), budget.item()) == (508, 512, 1024)


def test_fractional_budget_is_each_rows_own():
    case = make_case(2, [50, 10, 33], steps=10)
    policy = TreeKV(budget=0.5, sinks=2, block=4)
    _, _, states = run(policy, case)
    counts = [[len(s) for s in row] for row in kept(policy, case, states[-1])]
    assert counts == [[30, 30], [10, 10], [21, 21]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 4}, "need 5"),
        ({"budget": 0}, "budget=0"),
        ({"budget": 1.5}, "fraction"),
        ({"keep": "right"}, "'score', 'left'"),
        ({"cycle": "round"}, "'text', 'printed'"),
        ({"block": 0}, "block=0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"budget": 10, "recent": 6}, "need 11"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        TreeKV(**options)


def test_fraction_too_small_for_its_regions():
    with pytest.raises(PolicyError, match="gives 4 slots"):
        TreeKV(budget=0.1).validate(40)
