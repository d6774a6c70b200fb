"""Measures of what a policy keeps in each layer, against the plain definitions."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.analyses import layer_loss
from kvjax.analysis import layers
from kvjax.analysis.recording import Recorded, record
from kvjax.models import transformer
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
        return transformer._causal(tiny.config.rope.resolve(70), tiny.config, None, q, k, v)

    transformer._block(tiny.config, tiny.layers[0], transformer._embed(tiny, jnp.asarray([TEXT])), attend)
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


def test_lines_over_layers():
    values = {"chunkkv": np.asarray([0.9, 0.8, 0.7]), "streaming_llm": np.asarray([0.5, 0.4, 0.3])}
    panel = layer_loss.draw_layers(values, "attention cosine similarity").axes[0]
    assert [line.get_label() for line in panel.lines] == list(values)
    for line, expected in zip(panel.lines, values.values(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), expected)
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("layer", "attention cosine similarity")


def test_nothing_to_draw(monkeypatch):
    with pytest.raises(ValueError, match="no similarity"):
        layers.draw_similarity({})
    with pytest.raises(ValueError, match="no values"):
        layer_loss.draw_layers({}, "loss")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: layers.draw_similarity({"a": np.ones((2, 2))}),
        lambda: layer_loss.draw_layers({"a": np.ones(2)}, "loss"),
    ):
        with pytest.raises(ImportError, match=r"pip install .matplotlib"):
            draw()


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
