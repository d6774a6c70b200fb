"""Losses of whole layers, against the plain definitions."""

import numpy as np
import pytest

from kvjax.analysis import layers
from kvjax.analysis.recording import Recorded, record
from kvjax.policies import ChunkKV
from reproduction.analyses import layer_loss

TEXT = np.random.default_rng(4).integers(0, 64, size=70).tolist()
PROMPT = 60
SMALL = ChunkKV(budget=24, chunk=4, window=4)


@pytest.fixture(scope="module")
def recorded(tiny):
    return record(tiny, TEXT)


def masks(*rows):
    """[L, 1, T] from strings of kept (x) and dropped (.) tokens, one per layer."""
    return np.asarray([[[c == "x" for c in row]] for row in rows])


def test_cache_loss_by_hand():
    """Two tokens of one head: dropping the second loses |3| + |-1| of keys and |2| + |2| of values, over 8 entries."""
    layer = Recorded(np.zeros((2, 1, 2)), np.asarray([[[5.0, 5]], [[3, -1]]]), np.asarray([[[9.0, 9]], [[2, 2]]]))
    np.testing.assert_allclose(layer_loss.cache_loss([layer] * 3, masks("x.", "xx", "..")), [1, 0, 36 / 8])


def test_attention_similarity_by_hand():
    """One query sees logits log 3, log 4 and 0: probabilities 3/8, 4/8, 1/8. Without the second, (3, 0, 1) against (3, 4, 1)."""
    keys = np.log(np.asarray([3.0, 4.0, 1.0])).reshape(3, 1, 1)
    layer = Recorded(np.ones((3, 1, 1)), keys, np.zeros((3, 1, 1)))
    expected = [(3 * 3 + 1) / np.sqrt(10 * 26), 1, 1 / np.sqrt(26)]
    np.testing.assert_allclose(layer_loss.attention_similarity([layer] * 3, masks("x.", "xx", "..")), expected)


def test_attention_similarity_equals_the_definition(tiny, recorded):
    held = layers.kept(tiny, TEXT[:PROMPT], SMALL)
    expected = []
    for layer, mask in zip(recorded, held, strict=True):
        cosines = []
        for pos in range(PROMPT, 70):
            for n in range(4):
                present = np.r_[mask[n // 2], np.ones(10, bool)][: pos + 1]
                logits = layer.k[: pos + 1, n // 2] @ layer.q[pos, n] / 4
                full = np.exp(logits) / np.exp(logits).sum()
                part = np.where(present, np.exp(logits), 0) / np.exp(logits[present]).sum()
                cosines.append(full @ part / np.linalg.norm(full) / np.linalg.norm(part))
        expected.append(np.mean(cosines))
    found = layer_loss.attention_similarity(recorded, held)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found < 0.999).all()
    np.testing.assert_allclose(layer_loss.attention_similarity(recorded, np.ones_like(held)), 1)


def test_attention_inside_a_sliding_window():
    """Of three tokens the query, the last, sees two: what is dropped beyond its window costs nothing."""
    layer = Recorded(np.ones((3, 1, 1)), np.ones((3, 1, 1)), np.zeros((3, 1, 1)), window=2)
    np.testing.assert_allclose(layer_loss.attention_similarity([layer] * 2, masks(".x", "x.")), [1, np.sqrt(0.5)])


def test_attention_needs_queries_after_the_prompt(recorded):
    with pytest.raises(ValueError, match="none after its prompt of 70"):
        layer_loss.attention_similarity(recorded, np.ones((2, 2, 70), bool))
