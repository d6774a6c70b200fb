"""The default model, with its real weights, against transformers."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kvjax.models import Params
from kvjax.models.transformer import forward
from kvjax.runtime.generation import generate

pytestmark = pytest.mark.oracle

PROMPTS = (
    "The capital of France is",
    "Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


@pytest.fixture(scope="module")
def twin(smollm2: Params) -> Any:
    """The same weights in transformers."""
    return oracles.transformers_twin(smollm2)


def test_logits_equal_transformers(smollm2: Params, twin: Any) -> None:
    torch = pytest.importorskip("torch")
    rows = [smollm2.tokenizer.encode(text) for text in PROMPTS]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    # Operation by operation: the layers have the same ones, and all of them as one program take ten seconds to compile.
    got = np.asarray(forward(smollm2, jnp.asarray(tokens)))
    for logits, ids in zip(got, rows, strict=True):
        with torch.no_grad():
            want = twin(torch.tensor([ids])).logits[0].numpy()
        # 1e-4 is meant for logits of order 1; this model's are of order 6.
        assert np.abs(logits[: len(ids)] - want).max() <= 1e-4 * want.std()


@pytest.mark.slow
def test_greedy_decoding_equals_transformers(smollm2: Params, twin: Any) -> None:
    """Each token is the one transformers would generate next, so that by induction it generates the same 64."""
    torch = pytest.importorskip("torch")
    results = generate(smollm2, list(PROMPTS), policy="full", max_new_tokens=64, ignore_eos=True)
    for text, result in zip(PROMPTS, results, strict=True):
        prompt = smollm2.tokenizer.encode(text)
        with torch.no_grad():
            logits = twin(torch.tensor([prompt + result.tokens])).logits[0]
        assert len(result.tokens) == 64
        assert result.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
def test_wikitext_perplexity_equals_transformers(smollm2: Params, twin: Any, shared: Path) -> None:
    """WikiText-2 raw test: its first window of 2048 tokens."""
    torch = pytest.importorskip("torch")
    ids = smollm2.tokenizer.encode((shared / "data/text/wikitext-2/test.txt").read_text())
    window = np.asarray(ids[:2048], np.int32)

    @jax.jit
    def loss(params: Params, window: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(forward(params, window[None])[0, :-1])
        return -jnp.take_along_axis(logprobs, window[1:, None], axis=-1).mean()

    with torch.no_grad():
        text = torch.from_numpy(window).long()[None]
        theirs = twin(text, labels=text).loss.item()
    assert math.exp(loss(smollm2, window)) == pytest.approx(math.exp(theirs), rel=1e-4)
