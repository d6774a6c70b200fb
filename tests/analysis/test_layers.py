"""Measures of what a policy keeps in each layer, against the plain definitions."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.analysis import layers
from kvjax.analysis.recording import record
from kvjax.models import transformer
from kvjax.models.attention import causal_attention
from kvjax.models.layer import layers_of
from kvjax.policies import ChunkKV, Full, by_layer

TEXT = np.random.default_rng(4).integers(0, 64, size=70).tolist()
PROMPT = 60
SMALL = ChunkKV(budget=24, chunk=4, window=4)


@pytest.fixture(scope="module")
def recorded(tiny):
    return record(tiny, TEXT)


def test_recorded_is_what_attention_works_with(tiny, recorded):
    """From the first layer's queries, keys and values follows its attention output, by definition and in the model."""
    seen = []

    def attend(q, k, v):
        seen.append((q, k, v))
        return causal_attention(tiny.config.layers[0].mixer, tiny.config.rope.resolve(70), q, k, v)

    transformer._block(
        layers_of(tiny)[0], transformer._embed(tiny, jnp.asarray([TEXT])), jnp.arange(len(TEXT))[None], attend
    )
    assert len(recorded) == 2
    first = recorded[0]
    np.testing.assert_allclose(first.v, seen[0][2][0], atol=1e-6)
    expected = np.asarray(attend(*seen[0]))[0]
    for n in range(4):
        logits = first.q[:, n] @ first.k[:, n // 2].T / np.sqrt(16)
        logits[np.triu_indices(70, 1)] = -np.inf
        probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(probs @ first.v[:, n // 2], expected[:, n], atol=1e-5)


def test_nothing_to_record(tiny):
    with pytest.raises(ValueError, match="nothing to record"):
        record(tiny, [])
    with pytest.raises(ValueError, match="prompt is empty"):
        layers.kept(tiny, [], Full())


def test_kept(tiny):
    """Of 60 tokens: five chunks of four and the window of four."""
    held = layers.kept(tiny, TEXT[:PROMPT], SMALL)
    assert held.shape == (2, 2, PROMPT)
    assert (held.sum(axis=-1) == 24).all()
    assert held[..., -4:].all()
    assert (held[..., :56].reshape(2, 2, 14, 4).sum(axis=-1) % 4 == 0).all()
    assert layers.kept(tiny, TEXT[:PROMPT], Full()).all()


def test_kept_is_by_layer(tiny):
    held = layers.kept(tiny, TEXT[:PROMPT], by_layer([SMALL, Full()]))
    assert held[0].sum() == 48
    assert held[1].all()


def masks(*rows):
    """[L, 1, T] from strings of kept (x) and dropped (.) tokens, one per layer."""
    return np.asarray([[[c == "x" for c in row]] for row in rows])


def test_jaccard_by_hand():
    similarity = layers.jaccard(masks("xx..", "x.x.", "..xx"))
    np.testing.assert_allclose(similarity, [[1, 1 / 3, 0], [1 / 3, 1, 1 / 3], [0, 1 / 3, 1]])
    assert layers.neighbours(similarity) == pytest.approx(1 / 3)


def test_jaccard_is_a_mean_over_heads():
    kept = np.concatenate([masks("xx..", "xx.."), masks("xx..", "..xx")], axis=1)
    assert layers.jaccard(kept)[0, 1] == 0.5
    assert layers.jaccard(kept[:, :1])[0, 1] == 1
    assert layers.jaccard(masks("....", "...."))[0, 1] == 1


def test_jaccard_equals_sets(tiny):
    held = layers.kept(tiny, TEXT[:PROMPT], SMALL)
    similarity = layers.jaccard(held)
    sets = [[set(np.flatnonzero(head)) for head in layer] for layer in held]
    expected = np.mean([len(a & b) / len(a | b) for a, b in zip(*sets, strict=True)])
    np.testing.assert_allclose(similarity, [[1, expected], [expected, 1]])


def test_reuse_makes_layers_alike(tiny):
    shared = layers.kept(tiny, TEXT[:PROMPT], ChunkKV(budget=24, chunk=4, window=4, reuse=2))
    assert layers.neighbours(layers.jaccard(shared)) == 1


def test_one_layer_has_no_neighbours():
    with pytest.raises(ValueError, match="no neighbours"):
        layers.neighbours(np.ones((1, 1)))


def test_heat_maps(tmp_path):
    from matplotlib.image import imread

    matrices = {"one": np.asarray([[1, 0.25], [0.25, 1]]), "two": np.asarray([[1, 0.75], [0.75, 1]])}
    figure = layers.draw_similarity(matrices)
    for panel, (title, matrix) in zip(figure.axes, matrices.items(), strict=False):
        np.testing.assert_array_equal(panel.images[0].get_array(), matrix)
        assert panel.images[0].get_clim() == (0, 1)
        assert panel.get_title() == f"{title}\nadjacent layers {matrix[0, 1]:.2f}"
    assert "Jaccard" in figure.axes[-1].get_ylabel()
    figure.savefig(tmp_path / "map.png")
    assert len(np.unique(imread(tmp_path / "map.png")[..., :3].reshape(-1, 3), axis=0)) > 4


def test_nothing_to_draw(monkeypatch):
    with pytest.raises(ValueError, match="no similarity"):
        layers.draw_similarity({})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .matplotlib"):
        layers.draw_similarity({"a": np.ones((2, 2))})


@pytest.mark.long
def test_chunks_are_more_alike_than_tokens_across_layers(smollm2, shared):
    """The paper's Table 2, on a real model and text: chunks agree better from layer to layer than single tokens."""
    text = (shared / "data/text/books/2701_Moby_Dick_Or_The_Whale.txt").read_text(encoding="utf-8")
    tokens = smollm2.tokenizer.encode(text[:12_000])[:1024]
    chunks, single = (
        layers.neighbours(layers.jaccard(layers.kept(smollm2, tokens, kvjax.ChunkKV(budget=128, chunk=size))))
        for size in (10, 1)
    )
    assert chunks > single
