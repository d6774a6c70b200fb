"""Methods that compress while decoding, stopped once the prompt is read: what the definition keeps of a prompt, and all new tokens."""

import dataclasses

import numpy as np
import pytest
from policies import oracle_scoring as oracle
from policies.driver import TINY, kept, make_case, rotate, run
from policies.oracle_arrays import ROPE, softmax
from policies.test_scoring import STEPS, check

from kvjax.policies import (
    H2O,
    TOVA,
    Chelsea,
    Full,
    KeyDiff,
    PolicyError,
    SnapKV,
    StreamingLLM,
    TreeKV,
    by_layer,
    get_policy,
    offloaded,
    prompt_only,
    quantized,
)


def stopped(definition: type[oracle.Row]) -> type[oracle.Row]:
    """The same, without evictions."""
    return type(definition.__name__, (definition,), {"evict": lambda self: None})


CASES = {
    "tova": (TOVA(budget=9, keep_newest=True), oracle.TOVA, {"last": 1}, 2, 2),
    "h2o": (H2O(budget=0.5, recent=2), oracle.H2O, {"recent": 2}, 4, 2),
    "keydiff": (KeyDiff(budget=14), oracle.KeyDiff, {}, 4, 2),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "tova" else pytest.mark.slow) for n in CASES])
def test_equals_the_definition(name):
    policy, definition, told, heads, kv_heads = CASES[name]
    lengths = np.random.default_rng(len(name)).integers(3, 60, size=16)
    check(prompt_only(policy), stopped(definition), told, make_case(6, lengths, STEPS, heads, kv_heads))


@pytest.mark.parametrize("inner", [StreamingLLM(budget=12, sinks=4), TreeKV(budget=12, sinks=2, block=4)])
def test_places_in_the_cache_go_on(inner):
    """Where tokens stand at their places among the kept ones: what the method keeps of a prompt, then every new token after it."""
    case = make_case(4, [30, 5, 12, 13, 44], steps=6, heads=4, kv_heads=2)
    policy = prompt_only(inner)
    _, outputs, states = run(policy, case)
    before = kept(inner, case, run(inner, case)[2][0])
    assert kept(policy, case, states[0]) == before
    for row, length in enumerate(case.lengths.tolist()):
        for head in range(2):
            held = sorted(before[row][head])
            for i in range(case.steps):
                held.append(length + i)
                keys = np.stack([rotate(ROPE, case.k[row, p, head], place) for place, p in enumerate(held)])
                for n in (2 * head, 2 * head + 1):
                    query = rotate(ROPE, case.q[row, length + i, n], len(held) - 1)
                    out = softmax(keys @ query / np.sqrt(len(query))) @ case.v[row, held, head]
                    np.testing.assert_allclose(outputs[i, row, n], out, atol=2e-5)
            assert kept(policy, case, states[-1])[row][head] == set(held)


@pytest.mark.slow
def test_clusters_stay_as_they_are():
    """Chelsea's: the first query reads what it always would; the others find all of that and the new tokens, in slots of their own."""
    chelsea = Chelsea(budget=16, sinks=2, recent=4, chunk=8, every=1)
    case = make_case(5, [40, 50], steps=6)
    stays, goes = (run(policy, case) for policy in (prompt_only(chelsea), chelsea))
    np.testing.assert_allclose(stays[1][0], goes[1][0], atol=1e-5)
    assert [len(heads[0]) for heads in kept(prompt_only(chelsea), case, stays[2][-1])] == [22, 22]
    weight = np.asarray(stays[2][-1].weight)
    np.testing.assert_array_equal(weight.sum(axis=-1), [[46, 46], [56, 56]])


def test_memory_is_a_budget_and_new_tokens():
    sizes = TINY, 1, 1024, 256
    assert prompt_only(TOVA(budget=256)).nbytes(*sizes) == SnapKV(budget=256).nbytes(*sizes)
    assert prompt_only(TOVA(), budget=64).nbytes(*sizes) < prompt_only(TOVA(budget=256)).nbytes(*sizes)


def test_parts_keep_their_budgets():
    """Each policy of a combination is stopped by itself; what does not compress while decoding is as it was."""
    mixed = prompt_only(by_layer([TOVA(budget=8), SnapKV(budget=16, window=4)])).bind(TINY)
    spec = make_case(0, [40], 4).spec
    first, second = (mixed.layer(dataclasses.replace(spec, layer=layer)) for layer in (0, 1))
    assert first.max_kept == 8 + 4
    assert second == SnapKV(budget=16, window=4).layer(dataclasses.replace(spec, layer=1))
    assert prompt_only(prompt_only(TOVA(budget=8))).bind(TINY).layer(spec).max_kept == 8 + 4
    assert prompt_only(Full()).info.stage == "none"
    assert quantized(prompt_only(TOVA(budget=8)), bits=8).bind(TINY).info.memory == "quantized"


def test_refusals():
    with pytest.raises(PolicyError, match=r"offloaded\(prompt_only\(tova\)\)"):
        prompt_only(offloaded(TOVA(budget=8))).bind(TINY).layer(make_case(0, [4], 1).spec)
    with pytest.raises(PolicyError, match="budget=-8"):
        prompt_only(by_layer([TOVA(), TOVA()]), budget=-8)
    assert get_policy("prompt_only(tova)", budget=64) == prompt_only(TOVA(budget=64))
    with pytest.raises(PolicyError, match="has no budget to divide"):
        get_policy("pyramid(prompt_only(full))")
