"""The text after a compressed prompt, against the full model and by hand."""

import numpy as np
import pytest
from oracles import logits as logits_of
from policies.driver import each, every_policy

import kvjax
from kvjax.evals import Perplexity
from reproduction.analyses.continuation import Continuation, continuation

TEXTS = np.random.default_rng(3).integers(0, 64, size=(3, 90)).tolist()
PROMPT = 60
WHOLE = every_policy(budget=1.0)
WHOLE = [policy for policy in WHOLE if policy.info.memory != "quantized"]  # a few bits are near, not equal


@pytest.fixture(scope="module")
def full(tiny):
    return continuation(tiny, TEXTS, PROMPT, "full")


def test_full_cache_is_the_plain_model(tiny, full):
    logits = np.asarray(logits_of(tiny, np.asarray(TEXTS, np.int32)), np.float64)[:, PROMPT:-1]
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    for row, text, result in zip(expected, TEXTS, full, strict=True):
        chosen = row[np.arange(29), text[PROMPT + 1 :]]
        np.testing.assert_allclose(result.scores.logprobs, chosen, atol=5e-5)
        np.testing.assert_array_equal(result.predicted, row.argmax(axis=-1))
        assert result.scores.nll == pytest.approx(-chosen.mean(), abs=5e-5)


@pytest.mark.rotating  # one policy of each family is among the default tests
@each(WHOLE)
def test_a_whole_budget_agrees_with_the_full_cache(tiny, full, policy):
    for got, want in zip(continuation(tiny, TEXTS, PROMPT, policy), full, strict=True):
        assert got.agreement(want) == 1
        np.testing.assert_allclose(got.scores.logprobs, want.scores.logprobs, atol=5e-5)


def test_texts_are_read_apart(tiny):
    policy, seen = kvjax.StreamingLLM(budget=24), []
    together = continuation(tiny, TEXTS, PROMPT, policy, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(29, 29)]
    for text, row in zip(TEXTS, together, strict=True):
        (alone,) = continuation(tiny, [text], PROMPT, policy)
        np.testing.assert_allclose(row.scores.logprobs, alone.scores.logprobs, atol=5e-5)
        np.testing.assert_array_equal(row.predicted, alone.predicted)
        assert (
            row.scores.cache_bytes == alone.scores.cache_bytes == policy.nbytes(tiny.config, 1, PROMPT, 30, tiny.dtype)
        )


def test_a_tight_budget_shows(tiny, full):
    tight = continuation(tiny, TEXTS, PROMPT, kvjax.ChunkKV(chunk=4, window=4), budget=8)
    for got, want in zip(tight, full, strict=True):
        assert got.agreement(want) < 1
        assert np.abs(got.scores.logprobs - want.scores.logprobs).max() > 1e-2


def test_agreement_is_a_share_of_places():
    a, b = (Continuation(Perplexity(np.zeros(4)), np.asarray(x)) for x in ([1, 2, 3, 4], [1, 0, 3, 0]))
    assert a.agreement(b) == b.agreement(a) == 0.5


@pytest.mark.parametrize(
    ("texts", "prompt", "says"),
    [
        ([], 2, "texts of no tokens"),
        ([[1, 2, 3, 4], [1, 2, 3]], 2, r"texts of \[3, 4\] tokens"),
        ([[1, 2, 3, 4]], 3, "give 1 to 2"),
        ([[1, 2, 3, 4]], 0, "give 1 to 2"),
    ],
)
def test_what_cannot_be_measured(tiny, texts, prompt, says):
    with pytest.raises(ValueError, match=says):
        continuation(tiny, texts, prompt, "full")
    with pytest.raises(kvjax.PolicyError, match="gives 0 slots"):
        continuation(tiny, TEXTS, PROMPT, "streaming_llm:0.01,sinks=2")
