"""Attention under a policy beside full attention, against plain definitions over what the policy keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import every_policy

import kvjax
from kvjax.analysis.layers import jaccard, kept
from kvjax.analysis.recording import record
from kvjax.evals import fidelity
from kvjax.models import init, transformer
from kvjax.models.attention import causal_attention
from reproduction.analyses.layer_loss import attention_similarity

TEXTS = np.random.default_rng(8).integers(0, 64, size=(2, 72)).tolist()
PROMPT = 60
CHUNKS = kvjax.ChunkKV(budget=24, chunk=4, window=4)


@pytest.fixture(scope="module")
def readings(tiny):
    return [fidelity.read(tiny, text) for text in TEXTS]


def softmax(logits):
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return probs / probs.sum(axis=-1, keepdims=True)


def test_against_masked_softmax(tiny, readings):
    """A policy that keeps tokens as they are: every measure from its mask, in float64. 2 texts, 2 layers, 4 heads, 12 queries."""
    for text, reading in zip(TEXTS, readings, strict=True):
        found = fidelity.fidelity(tiny, reading, PROMPT, CHUNKS, top=10)
        mask = kept(tiny, text[:PROMPT], CHUNKS, new_tokens=12)
        layers = record(tiny, text)
        for i, layer in enumerate(layers):
            for n in range(4):
                head = n // 2
                held = np.concatenate([mask[i, head], np.ones(12, bool)])
                measures = []
                for s in range(PROMPT, 72):
                    logits = layer.k[: s + 1, head].astype(np.float64) @ layer.q[s, n] / 4
                    full, left = softmax(logits), softmax(np.where(held[: s + 1], logits, -np.inf))
                    exact, got = (p @ layer.v[: s + 1, head] for p in (full, left))
                    important = np.argsort(-full)[:10]
                    measures.append(
                        (
                            np.mean(held[important]),
                            np.linalg.norm(got - exact) / np.linalg.norm(exact),
                            full @ left / np.linalg.norm(full) / np.linalg.norm(left),
                        )
                    )
                seen = found.recall[i, n], found.output_error[i, n], found.cosine[i, n]
                np.testing.assert_allclose(seen, np.mean(measures, axis=0), rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(found.jaccard, jaccard(mask))
        np.testing.assert_allclose(found.cosine.mean(axis=-1), attention_similarity(layers, mask), rtol=1e-4)
        assert found.cache_bytes == CHUNKS.nbytes(tiny.config, 1, PROMPT, 12, tiny.dtype)
        assert found.means()["jaccard"] == pytest.approx(jaccard(mask)[0, 1])


@pytest.mark.parametrize("name", [pytest.param("chelsea", marks=pytest.mark.slow), "clusterkv"])
def test_named_values_tell_what_is_read(tiny, readings, name):
    """Merging, recalling and moving policies: weights sum to one, and the real values, weighted by them, are the output."""
    policy = next(policy for policy in every_policy(budget=32) if policy.info.name == name).bind(tiny.config)
    specs = fidelity.layer_specs(tiny.config, 1 + -(-72 // 16), PROMPT, 12, jnp.float32)
    for layer, v in zip(fidelity._replay(policy, specs, PROMPT, readings[0]), readings[0].v, strict=True):
        weights = np.moveaxis(np.asarray(layer)[:, 1:], 1, 2).reshape(12, 4, -1)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        assert (weights[..., 72:] == 0).all()
        expected = np.einsum("snt,tnh->snh", weights[..., :72], np.repeat(np.asarray(v), 2, axis=1))
        np.testing.assert_allclose(np.asarray(layer)[:, 0], expected, atol=1e-5)


def test_the_full_cache_is_faithful(tiny, readings):
    found = fidelity.fidelity(tiny, readings[0], PROMPT, "full")
    np.testing.assert_allclose(found.recall, 1)
    np.testing.assert_allclose(found.cosine, 1, atol=1e-6)
    assert found.output_error.max() < 1e-5
    np.testing.assert_allclose(found.jaccard, 1)


def test_a_reading_is_the_models(tiny, readings):
    """Layer 1's keys follow from layer 0's output."""
    seen = []

    def attend(layer, q, k, v):
        seen.append(k)
        return causal_attention(tiny.config.layers[layer].mixer, tiny.config.rope.resolve(72), q, k, v)

    transformer.hidden(tiny, jnp.asarray(TEXTS[:1], jnp.int32), attend)
    for mine, models in zip(readings[0].k, seen, strict=True):
        np.testing.assert_allclose(mine, models[0], atol=1e-5)


def test_a_sweep_reads_once(tiny):
    seen = []
    found = fidelity.sweep(tiny, TEXTS[0], PROMPT, [kvjax.Full(), CHUNKS], progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]
    assert found[0].means()["recall"] == 1 > found[1].means()["recall"]


def test_what_cannot_be_compared(tiny, readings):
    with pytest.raises(ValueError, match="give 1 to 71"):
        fidelity.fidelity(tiny, readings[0], 72, "full")
    with pytest.raises(ValueError, match="give 1 or more"):
        fidelity.fidelity(tiny, readings[0], PROMPT, "full", top=0)
    with pytest.raises(ValueError, match="text is empty"):
        fidelity.read(tiny, [])
    sinks = init(tiny.config.with_attention(sinks=True), jax.random.key(0))
    with pytest.raises(ValueError, match="not implemented for models with attention sinks"):
        fidelity.read(sinks, TEXTS[0])
    with pytest.raises(kvjax.PolicyError, match="unknown policy"):
        fidelity.fidelity(tiny, readings[0], PROMPT, "nope")
