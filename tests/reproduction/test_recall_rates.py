"""Recall rates by policy and budget, and the picture of them."""

import dataclasses
import sys

import numpy as np
import pytest
from policies.driver import make_case, rotate

from kvjax.analysis import recall
from kvjax.analysis.recording import Recorded
from kvjax.policies import ClusterKV
from reproduction.analyses import recall_rates

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


def test_rates_rise_with_budget_and_clusters(layer):
    """As in Figure 11: more tokens, or finer clusters, find more of the top; one cluster per token finds all of it."""
    fine = dataclasses.replace(POLICY, n_clusters=60, window=20, sinks=0)
    calls = []
    coarse = recall_rates.rates([layer] * 2, {"8 clusters": POLICY}, [12, 24], PROMPT, lambda *done: calls.append(done))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert coarse["8 clusters"][12] < coarse["8 clusters"][24] < 1
    single = recall.replay(POLICY, layer, PROMPT)
    assert coarse["8 clusters"][12] == pytest.approx(recall.recall_rate(*single).mean())
    assert recall_rates.rates([layer], {"fine": fine}, [12], PROMPT) == {"fine": {12: 1.0}}


def test_the_picture_shows_the_rates():
    rates = {"cosine": {256: 0.5, 512: 0.6}, "l2": {256: 0.4, 512: 0.55}}
    panel = recall_rates.draw_rates(rates).axes[0]
    for line, (name, values) in zip(panel.lines, rates.items(), strict=True):
        assert line.get_label() == name
        assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == values
    assert "tokens" in panel.get_xlabel()
    assert "recall rate" in panel.get_ylabel()


def test_nothing_to_draw(monkeypatch):
    with pytest.raises(ValueError, match="no rates"):
        recall_rates.draw_rates({})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .matplotlib"):
        recall_rates.draw_rates({"a": {1: 0.5}})
