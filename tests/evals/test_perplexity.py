"""Perplexity against the plain definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import logits as logits_of

import kvjax
from kvjax.evals import streaming, windowed
from kvjax.models import transformer

TOKENS = np.random.default_rng(0).integers(0, 64, size=700).tolist()


@pytest.fixture(scope="module")
def logprobs(tiny):
    """Log-probability of each token after the first, from all logits at once."""

    def of(tokens):
        logits = np.asarray(logits_of(tiny, np.asarray([tokens], np.int32)))[0, :-1].astype(np.float64)
        return np.take_along_axis(logits - np.log(np.sum(np.exp(logits), -1, keepdims=True)), np.c_[tokens[1:]], 1)[
            :, 0
        ]

    return of


def test_windows_stand_alone(tiny, logprobs):
    seen = []
    result = windowed(tiny, TOKENS, window=300, progress=lambda done, of: seen.append((done, of)))
    expected = np.concatenate([logprobs(TOKENS[:300]), logprobs(TOKENS[300:600])])
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)
    assert result.nll == pytest.approx(-expected.mean(), abs=1e-6)
    assert result.perplexity == pytest.approx(np.exp(-expected.mean()), rel=1e-6)
    assert seen == [(1, 2), (2, 2)]
    assert len(windowed(tiny, TOKENS, window=100, windows=3).logprobs) == 3 * 99


def test_streaming_the_full_cache_is_one_window(tiny, logprobs):
    """600 tokens: more than one chunk of the compiled loop, and a last chunk that is not full."""
    result = streaming(tiny, TOKENS[:600], "full")
    np.testing.assert_allclose(result.logprobs, logprobs(TOKENS[:600]), atol=5e-5)
    assert result.part(10, 20).nll == pytest.approx(-result.logprobs[10:20].mean())


@pytest.mark.parametrize("policy", ["treekv", "streaming_llm"])
def test_streaming_within_a_budget(tiny, logprobs, policy):
    result = streaming(tiny, TOKENS, policy, budget=32)
    assert result.cache_bytes == kvjax.get_policy(policy, budget=32).nbytes(tiny.config, 1, 0, len(TOKENS), tiny.dtype)
    expected = logprobs(TOKENS)
    np.testing.assert_allclose(result.logprobs[:31], expected[:31], atol=2e-5)
    assert np.abs(result.logprobs[64:] - expected[64:]).max() > 1e-3
    assert np.isfinite(result.logprobs).all()


def test_windows_that_overlap_score_each_token_once(tiny, logprobs):
    result = windowed(tiny, TOKENS, window=300, stride=150)
    expected = [logprobs(TOKENS[:300]), logprobs(TOKENS[150:450])[-150:], logprobs(TOKENS[300:600])[-150:]]
    np.testing.assert_allclose(result.logprobs, np.concatenate(expected), atol=2e-5)
    with pytest.raises(ValueError, match="give 1 to 300"):
        windowed(tiny, TOKENS, window=300, stride=301)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_streaming_goes_on(tiny, tmp_path, monkeypatch, dtype):
    """Stopped after the first of two chunks: the rest is read into the saved caches, which bfloat16 survives too."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny)
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 100)).__next__)
    policy, file = kvjax.StreamingLLM(budget=32), tmp_path / "state.npz"
    expected = streaming(params, TOKENS, policy)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streaming(params, TOKENS, policy, checkpoint=file, progress=interrupt)
    assert file.exists()
    with pytest.raises(ValueError, match="of another run"):
        streaming(params, TOKENS[:-1], policy, checkpoint=file)
    seen = []
    resumed = streaming(params, TOKENS, policy, checkpoint=file, progress=lambda *done: seen.append(done))
    assert seen == [(187, 187)]  # of 699 tokens, less one chunk of 512
    np.testing.assert_array_equal(resumed.logprobs, expected.logprobs)
    assert resumed.cache_bytes == expected.cache_bytes
    assert not file.exists()
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        streaming(params, TOKENS, policy, checkpoint=file)


def test_what_cannot_be_measured(tiny):
    with pytest.raises(ValueError, match="which has 2"):
        windowed(tiny, TOKENS, window=300, windows=3)
    with pytest.raises(ValueError, match="2 or more"):
        streaming(tiny, TOKENS[:1], "full")
    with pytest.raises(kvjax.PolicyError, match="budget"):
        streaming(tiny, TOKENS, "treekv", budget=2)


def test_scoring_needs_no_logits_of_all_positions(tiny):
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    memory = jax.jit(transformer.token_logprobs).lower(tiny, tokens).compile().memory_analysis()
    assert memory.output_size_in_bytes < 2048 * 8
