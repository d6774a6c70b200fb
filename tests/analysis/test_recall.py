"""Recall and hit rates, against the plain definitions and against what the policy itself does."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import make_case, rotate
from policies.oracle_clusterkv import ClusterHead

from kvjax.analysis import recall
from kvjax.analysis.recording import Recorded
from kvjax.policies import ClusterKV, InfiniGen, Quest

POLICY = ClusterKV(budget=12, sinks=3, dense_layers=0, n_clusters=8, window=6, new_clusters=2)
PROMPT = 40


@pytest.fixture(scope="module")
def case():
    return make_case(3, [PROMPT], steps=20)


@pytest.fixture(scope="module")
def layer(case) -> Recorded:
    """The same inputs as a model would have been recorded with: already rotated."""
    turned = [
        np.stack([[rotate(case.spec.rope, head, pos) for head in x[0, pos]] for pos in range(60)]).astype(np.float32)
        for x in (case.q, case.k)
    ]
    return Recorded(*turned, case.v[0])


@pytest.fixture(scope="module")
def replayed(layer):
    return recall.replay(POLICY, layer, PROMPT)


def test_replay_chooses_what_the_policy_does(case, layer, replayed):
    """Against the oracle, fed with the policy's own random start."""
    spec = dataclasses.replace(case.spec, prompt_len=PROMPT)
    pos = np.arange(60, dtype=np.int32)[None]
    draws = np.asarray(POLICY.layer(spec).shuffled(jnp.asarray(pos), jnp.ones(pos.shape, bool)))[0]
    for head in range(2):
        rank = np.argsort(draws[head])
        oracle = ClusterHead(POLICY, lambda positions, rank=rank: np.argsort(rank[positions]))
        oracle.prefill(case.k[0, :PROMPT, head], case.v[0, :PROMPT, head])
        for i in range(20):
            pos, queries = PROMPT + i, case.q[0, PROMPT + i, 2 * head : 2 * head + 2]
            tail = [*oracle.tail, pos]
            _, selected = oracle.step(queries, case.k[0, pos, head], case.v[0, pos, head], pos)
            for g, tokens in enumerate(selected):
                chosen, logits = (x[i, 2 * head + g] for x in replayed)
                assert set(np.flatnonzero(chosen).tolist()) == {0, 1, 2, *tokens}
                asked = [p for p in range(pos + 1) if p not in tail]
                assert np.flatnonzero(np.isfinite(logits)).tolist() == asked
                expected = layer.k[asked, head] @ layer.q[pos, 2 * head + g] / np.sqrt(8)
                np.testing.assert_allclose(logits[asked], expected, atol=1e-4)


def test_clusters_are_the_oracles(case, layer):
    labels = recall.clusters(POLICY, layer, PROMPT)
    spec = dataclasses.replace(case.spec, prompt_len=PROMPT)
    pos = np.arange(60, dtype=np.int32)[None]
    draws = np.asarray(POLICY.layer(spec).shuffled(jnp.asarray(pos), jnp.ones(pos.shape, bool)))[0]
    for head in range(2):
        rank = np.argsort(draws[head])
        oracle = ClusterHead(POLICY, lambda positions, rank=rank: np.argsort(rank[positions]))
        oracle.prefill(case.k[0, :PROMPT, head], case.v[0, :PROMPT, head])
        found = [np.flatnonzero(labels[head] == cluster).tolist() for cluster in range(8)]
        assert sorted(found) == sorted(sorted(cluster) for cluster in oracle.clusters)
        assert (labels[head, :3] == -1).all()


def test_budget_is_what_is_chosen(replayed):
    assert (replayed.chosen.sum(axis=-1) == 12).all()


def test_mean_queries_choose_for_the_whole_group(layer):
    chosen = recall.replay(dataclasses.replace(POLICY, gqa="mean"), layer, PROMPT).chosen
    assert chosen.shape == (20, 4, 60)
    np.testing.assert_array_equal(chosen[:, 0::2], chosen[:, 1::2])


def test_quest_chooses_the_pages_with_the_highest_bounds(layer):
    """Three pages of four tokens, by the most that any key within a page's ranges can have as product with the query."""
    replayed = recall.replay(Quest(budget=12, page=4, dense_layers=0), layer, PROMPT)
    for step, head in np.ndindex(20, 4):
        seen = PROMPT + step + 1
        query = layer.q[seen - 1, head].astype(np.float64)
        pages = [layer.k[at : min(at + 4, seen), head // 2] for at in range(0, seen, 4)]
        bounds = [np.sum(np.maximum(query * page.min(axis=0), query * page.max(axis=0))) for page in pages]
        best = np.argsort(-np.asarray(bounds), kind="stable")[:3]
        expected = [token for page in best for token in range(4 * page, min(4 * page + 4, seen))]
        assert np.flatnonzero(replayed.chosen[step, head]).tolist() == sorted(expected)
        assert np.isfinite(replayed.logits[step, head]).sum() == seen


def test_infinigen_that_knows_all_channels_chooses_the_top_of_its_group(layer):
    """All tokens are near enough the highest score, and all channels count: the best of the group's mean query, and the newest."""
    replayed = recall.replay(InfiniGen(budget=12, alpha=1e9, share=1.0, dense_layers=0), layer, PROMPT)
    for step, head in np.ndindex(20, 4):
        pos, group = PROMPT + step, head // 2
        query = layer.q[pos, 2 * group : 2 * group + 2].mean(axis=0, dtype=np.float64)
        best = np.argsort(-(layer.k[:pos, group] @ query), kind="stable")[:11]
        assert np.flatnonzero(replayed.chosen[step, head]).tolist() == sorted(best.tolist())
        assert np.isfinite(replayed.logits[step, head]).sum() == pos


def test_recall_rate_is_the_share_of_the_top():
    """Two are chosen; the two most attended are tokens 3 and 1 (of equals the first)."""
    logits = np.asarray([0.0, 2.0, 2.0, 5.0, -np.inf])
    for tokens, rate in (([1, 3], 1.0), ([2, 3], 0.5), ([0, 2], 0.0)):
        chosen = np.isin(np.arange(5), tokens)
        assert recall.recall_rate(chosen, logits) == rate
    assert recall.recall_rate(np.zeros(5, bool), logits) == 1.0


def test_recall_rate_by_definition(replayed):
    rates = recall.recall_rate(*replayed)
    for step, head in np.ndindex(20, 4):
        chosen = set(np.flatnonzero(replayed.chosen[step, head]).tolist())
        true = set(np.argsort(-replayed.logits[step, head], kind="stable")[: len(chosen)].tolist())
        assert rates[step, head] == len(chosen & true) / len(true)
    assert 0.2 < rates.mean() < 0.95


def test_hit_rate_by_hand():
    """One head and three tokens: {0}, {1, 2}, {0, 1}."""
    chosen = np.asarray([[1, 0, 0], [0, 1, 1], [1, 1, 0]], bool)
    assert recall.hit_rate(chosen, 1) == 1 / 4
    assert recall.hit_rate(chosen, 2) == 2 / 4
    assert recall.hit_rate(chosen[[0, 0, 0]]) == 1.0


def test_hit_rate_grows_with_the_steps_kept(replayed):
    found = [recall.hit_rate(replayed.chosen, steps) for steps in (1, 2, 4, 20)]
    assert found == sorted(found)
    assert found[0] < found[-1] <= 1


def test_rates_rise_with_budget_and_clusters(layer):
    """As in Figure 11: more tokens, or finer clusters, find more of the top; one cluster per token finds all of it."""

    def rate(policy: ClusterKV) -> float:
        return recall.recall_rate(*recall.replay(policy, layer, PROMPT)).mean()

    fine = dataclasses.replace(POLICY, n_clusters=60, window=20, sinks=0)
    assert rate(POLICY) < rate(dataclasses.replace(POLICY, budget=24)) < 1
    assert rate(fine) == 1.0


def test_what_cannot_be_done(layer):
    with pytest.raises(ValueError, match="give 1 to 59"):
        recall.replay(POLICY, layer, 60)
    with pytest.raises(ValueError, match="covers the whole text of 60"):
        recall.replay(dataclasses.replace(POLICY, budget=60), layer, PROMPT)
    with pytest.raises(ValueError, match="steps=0"):
        recall.hit_rate(np.ones((3, 4), bool), 0)
