"""The study of Chelsea's clusters, where what it should find is known."""

import dataclasses

import numpy as np
import pytest
from policies.driver import make_case, rotate

from kvjax.analysis.recording import Recorded
from kvjax.policies import Chelsea
from reproduction.analyses import chelsea_clusters

PROMPT, AFTER = 56, 6


def recorded(k: np.ndarray | None = None) -> tuple:
    """A layer's spec and what was recorded of it, with these keys for all positions or random ones."""
    case = make_case(0, [PROMPT], AFTER, heads=4, kv_heads=2)
    rope = case.spec.rope

    def turned(x: np.ndarray) -> np.ndarray:
        return np.asarray([[rotate(rope, head, pos) for head in heads] for pos, heads in enumerate(x)], np.float32)

    keys = turned(case.k[0]) if k is None else k
    spec = dataclasses.replace(case.spec, prompt_len=64)
    return spec, Recorded(turned(case.q[0]), keys, case.v[0])


def test_nothing_is_lost_where_nothing_is_merged():
    found = chelsea_clusters.clusters(Chelsea(budget=1.0), *recorded(), PROMPT)
    assert found["slots"] == found["tokens"] == pytest.approx([1, 0, 0, 0])
    assert found["error"] == pytest.approx(0, abs=1e-5)
    assert found["shrink"] == 0


def test_equal_keys_do_not_shrink_and_cost_only_values():
    """All keys but the first are one: any cluster's key is that key, and has its length."""
    spec, layer = recorded()
    same = np.broadcast_to(layer.k[1], layer.k.shape).copy()
    small = Chelsea(budget=16, sinks=1, recent=2, chunk=8, every=1)
    found = chelsea_clusters.clusters(small, spec, layer._replace(k=same), PROMPT)
    assert found["shrink"] == pytest.approx(0, abs=1e-5)
    assert found["error"] == pytest.approx(0, abs=1e-3)  # the mean of values is what equal keys read
    assert sum(found["tokens"]) == pytest.approx(1)
    assert found["tokens"][0] < 0.5


def test_centroids_of_random_keys_are_shorter():
    """Of n independent keys the mean is about 1 / √n as long; most clusters here have a few."""
    small = Chelsea(budget=16, sinks=1, recent=2, chunk=8, every=1)
    found = chelsea_clusters.clusters(small, *recorded(), PROMPT)
    assert 0.1 < found["shrink"] < 0.8
    assert found["error"] > 0.1
    assert found["error, keys at full length"] != found["error"]
    for name in ("slots", "tokens", "attention"):
        assert sum(found[name]) == pytest.approx(1)
    assert found["slots"][0] > found["tokens"][0]


def test_all_variants_are_policies():
    named = chelsea_clusters.policies(0.125)
    assert len({str(policy) for policy in named.values()}) == len(named) == len(chelsea_clusters.VARIANTS) + 2
