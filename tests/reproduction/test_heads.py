"""Recalled attention against plain definitions."""

import numpy as np
import pytest

from kvjax.analysis.layers import kept
from kvjax.analysis.recording import record
from kvjax.policies import CateKV, StreamingLLM
from reproduction.analyses import heads

LABELS = (("adaptive", "consistent"), ("consistent", "consistent"))
TEXT = np.random.default_rng(6).integers(0, 64, size=76).tolist()
PROMPT = 60


@pytest.fixture(scope="module")
def layers(tiny):
    return record(tiny, TEXT)


def attention(layer, head: int, pos: int) -> np.ndarray:
    """What the group of a KV head attends to from a position, on average."""
    rows = [np.exp(layer.k[: pos + 1, head] @ layer.q[pos, n] / 4) for n in (2 * head, 2 * head + 1)]
    return np.mean([row / row.sum() for row in rows], axis=0)


def test_recall_of_fixed_tokens(tiny, layers):
    policy = CateKV(budget=16, sinks=2, recent=2, chunk=4, window=8, profile=LABELS)
    mask = kept(tiny, TEXT[:PROMPT], policy)
    found = heads.recall(layers, mask)
    for layer, head in np.ndindex(2, 2):
        inside = np.append(mask[layer, head], np.ones(16, bool))
        want = [attention(layers[layer], head, pos)[inside[: pos + 1]].sum() for pos in range(PROMPT, 76)]
        assert found[layer, head] == pytest.approx(np.mean(want), rel=1e-5)
    assert found[0, 0] == pytest.approx(1.0)  # an adaptive head keeps everything


def test_recall_of_the_best_tokens(layers):
    found = heads.top_recall(layers, PROMPT, 16)
    for layer, head in np.ndindex(2, 2):
        rows = [attention(layers[layer], head, pos) for pos in range(PROMPT, 76)]
        want = [np.sort(row[:PROMPT])[-16:].sum() + row[PROMPT:].sum() for row in rows]
        assert found[layer, head] == pytest.approx(np.mean(want), rel=1e-5)


def test_recall_of_promising_chunks(layers):
    """15 chunks of 4 less 2 sinks and 2 recent tokens leave 14; a budget of 16 takes three."""
    found = heads.page_recall(layers, PROMPT, 16, sinks=2, recent=2, chunk=4)
    for layer, head in np.ndindex(2, 2):
        recalled = []
        for pos in range(PROMPT, 76):
            promise = np.zeros(14)
            for i in range(14):
                keys = layers[layer].k[2 + 4 * i : 6 + 4 * i, head]
                for n in (2 * head, 2 * head + 1):
                    query = layers[layer].q[pos, n]
                    promise[i] += np.maximum(query * keys.min(axis=0), query * keys.max(axis=0)).sum()
            tokens = {2 + 4 * i + j for i in np.argsort(-promise)[:3] for j in range(4)} | {0, 1, 58, 59}
            recalled.append(attention(layers[layer], head, pos)[[*tokens, *range(PROMPT, pos + 1)]].sum())
        assert found[layer, head] == pytest.approx(np.mean(recalled), rel=1e-5)


def test_no_choice_recalls_more_than_the_best(tiny, layers):
    best = heads.top_recall(layers, PROMPT, 16)
    consistent = CateKV(budget=16, sinks=2, recent=2, chunk=4, window=8, profile=(("consistent",) * 2,) * 2)
    for policy in (consistent, StreamingLLM(budget=16, sinks=2)):
        assert (heads.recall(layers, kept(tiny, TEXT[:PROMPT], policy)) <= best + 1e-6).all()
    assert (heads.page_recall(layers, PROMPT, 16, 2, 2, 4) <= best + 1e-6).all()
    np.testing.assert_allclose(heads.top_recall(layers, PROMPT, PROMPT), 1.0, rtol=1e-5)


def test_what_cannot_be_recalled(layers):
    with pytest.raises(ValueError, match="none after its prompt of 76"):
        heads.top_recall(layers, 76, 8)
    with pytest.raises(ValueError, match="no room for a chunk of 8"):
        heads.page_recall(layers, PROMPT, 10, 2, 2)
