"""`then`: Quest's selection among what SnapKV leaves of a prompt, against both literal algorithms."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from policies import oracle_scoring as scoring
from policies.driver import TINY, make_case, run
from policies.oracle_arrays import softmax
from policies.oracle_quest import QuestHead
from policies.slots import kept

import kvjax
from kvjax.policies import (
    AdaKV,
    Full,
    PolicyError,
    PyramidKV,
    Quest,
    ShadowKV,
    SnapKV,
    get_policy,
    offloaded,
    quantized,
    then,
)
from kvjax.policies.budget import budget_tokens

STEPS = 6
CONFIGURATIONS = {
    "gqa": (SnapKV(budget=20, window=4), {"budget": 8, "page": 4}, 4, 2),
    "mqa, a fraction, recent pages": (
        SnapKV(budget=0.5, window=3),
        {"budget": 12, "page": 3, "recent": 2, "gqa": "sum"},
        4,
        1,
    ),
    "mha, pages of a token": (SnapKV(budget=24, window=5, pool=None), {"budget": 6, "page": 1}, 2, 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gqa" else pytest.mark.slow) for n in CONFIGURATIONS]
)
def test_equals_the_literal_algorithms(name):
    """Ragged rows, prompts shorter and longer than both budgets: what is held, and outputs of queries that read a part."""
    first, options, heads, kv_heads = CONFIGURATIONS[name]
    policy, group = then(first, Quest(**options, dense_layers=0)), heads // kv_heads
    lengths = np.random.default_rng(len(name)).integers(1, 64, size=70)
    case = make_case(4, lengths, STEPS, heads, kv_heads)
    state, outputs, _ = run(policy, case, padding=np.nan)
    held, sizes = kept(policy, case, state), {"read in part": 0, "read whole": 0}
    for row, length in enumerate(lengths.tolist()):
        texts = [x[row, : length + STEPS] for x in (case.q, case.k, case.v)]
        budget = max(budget_tokens(first.budget, length + STEPS), first.least_slots)
        literal = scoring.SnapKV(*texts, length, budget)
        vars(literal).update(window=first.window, pool=first.pool, kernel=first.kernel)
        left = literal.prefill()
        for head in range(kv_heads):
            assert held[row][head] == {*left[head], *range(length, length + STEPS)}
            store = QuestHead(**options)
            positions = [*sorted(left[head]), *range(length, length + STEPS)]
            for i, pos in enumerate(positions):
                store.keys.append(literal.turned[pos, head])
                store.values.append(literal.v[pos, head])
                if (step := i - len(left[head])) < 0:
                    continue
                queries = literal.asking[pos, head * group : (head + 1) * group]
                scores = np.asarray([store.bounds(q) for q in queries])
                if options.get("gqa") == "sum":
                    scores = np.broadcast_to(scores.sum(axis=0), scores.shape)
                for n, (q, row_scores) in enumerate(zip(queries, scores, strict=True)):
                    read = store.chosen(row_scores)
                    sizes["read in part" if len(read) < len(store.keys) else "read whole"] += 1
                    probs = softmax(np.stack([store.keys[t] for t in read]) @ q / np.sqrt(len(q)))
                    want = probs @ np.stack([store.values[t] for t in read])
                    np.testing.assert_allclose(outputs[step, row, head * group + n], want, atol=3e-5)
    assert min(sizes.values()) > 0


def test_a_selection_of_everything_is_the_first_policy_alone():
    first, case = SnapKV(budget=20, window=4), make_case(2, [50, 9, 33], STEPS)
    whole = then(first, Quest(budget=1000, page=4))
    assert whole.layer(case.spec) == first.layer(case.spec)
    whole = then(first, Quest(budget=28, page=4, dense_layers=0))
    np.testing.assert_allclose(run(whole, case)[1], run(first, case)[1], atol=2e-6)


def test_a_model_generates_with_less_memory_and_fewer_reads(tiny):
    policy = then(SnapKV(budget=32, window=4), Quest(budget=16, page=4, dense_layers=0))
    prompts = [np.random.default_rng(i).integers(0, 64, size=n).tolist() for i, n in enumerate((90, 20))]
    together = kvjax.generate(tiny, prompts, policy=policy, max_new_tokens=8, ignore_eos=True)
    for prompt, got in zip(prompts, together, strict=True):
        assert kvjax.generate(tiny, prompt, policy=policy, max_new_tokens=8, ignore_eos=True).tokens == got.tokens
    stats = together[0].stats
    assert stats.cache_bytes == policy.nbytes(tiny.config, 2, 90, 8, jnp.float32) < stats.full_cache_bytes
    assert stats.step_bytes_read < stats.cache_bytes


def test_the_budget_is_the_first_policys():
    policy = then(SnapKV(budget=64), Quest(budget=32))
    assert get_policy(policy, budget=0.25) == then(SnapKV(budget=0.25), Quest(budget=32))
    assert policy.budget == 64
    assert policy.info.memory == "freed"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (then(AdaKV(), Quest()), "does not keep the same number of a prompt's tokens in each head"),
        (then(Full(), Quest()), "does not keep the same number of a prompt's tokens in each head"),
        (
            then(SnapKV(), ShadowKV(budget=64, rank=4, outlier_chunks=2)),
            "does not select from a cache of rotated keys. End with quest",
        ),
        (then(SnapKV(), get_policy("tova")), "does not select from a cache of rotated keys"),
        (offloaded(then(SnapKV(), Quest(dense_layers=0, budget=64))), "offloaded"),
        (quantized(then(SnapKV(), Quest(dense_layers=0, budget=64))), "quantized"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(policy, says):
    spec = make_case(0, [2000], 1).spec
    with pytest.raises(PolicyError, match=says):
        policy.layer(spec)


def test_sliding_windows_are_refused():
    spec = dataclasses.replace(make_case(0, [50], 1).spec, window=12)
    with pytest.raises(PolicyError, match=r"layers with a sliding window are not supported\. Use snapkv"):
        then(SnapKV(), Quest()).layer(spec)
    assert then(PyramidKV(budget=64), Quest()).bind(TINY).first == PyramidKV(budget=64)
