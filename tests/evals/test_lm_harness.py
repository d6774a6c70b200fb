"""Tests of `kvjax.evals.lm_harness`, kvjax as a model of lm-evaluation-harness.

Log-likelihoods are compared with those computed from full logits, generated texts with `kvjax.generate`, and a real
model with the harness's own `hf` model.

Fixtures of `conftest.py`: `talker` is a random Llama with a tokenizer and a window of 8192 tokens, `tiny` is a random
model without a tokenizer, and `smollm2` is the default model in float32.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import logits as logits_of

import kvjax
from kvjax.config import Yarn
from kvjax.conversion import Tokenizer
from kvjax.evals import lm_harness

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is in the `lm-eval` extra")


@pytest.fixture(scope="module")
def model(talker):
    """kvjax's class of the harness with `talker` and the full cache, for at most 40 tokens at a time."""
    return lm_harness.register()(talker, max_length=40, batch_size=2)


def requests(*arguments):
    """Requests of the harness with these arguments."""
    return [SimpleNamespace(args=each) for each in arguments]


def logprobs(params, tokens):
    """Log-probability of each token after the first, from full logits."""
    logits = np.asarray(logits_of(params, np.asarray([tokens], np.int32)))[0, :-1].astype(np.float64)
    scores = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return scores[np.arange(len(scores)), tokens[1:]]


def test_another_tokenizer(talker):
    other = Tokenizer(talker.tokenizer.backend, eos=talker.tokenizer.eos, chat_template="another")
    assert lm_harness.register()(talker, tokenizer=other).params.tokenizer == other
    assert talker.tokenizer != other


def test_it_is_registered(model):
    assert lm_eval.api.registry.get_model("kvjax") is type(model)


def test_its_length_is_the_scaled_window(talker):
    rope = dataclasses.replace(talker.config.rope, scaling=Yarn(4.0, 8192))
    scaled = talker.replace(config=talker.config.with_attention(rope=rope))
    found = [lm_harness.register()(params).max_length for params in (talker, scaled)]
    assert found == [8192, 32768]


def test_loglikelihood(talker, model):
    """The harness moves trailing spaces of the context to the continuation.

    An empty context becomes the prefix token, id 0.
    """
    found = model.loglikelihood(requests(("hello", " there"), ("a b ", "c"), ("", "hello")), disable_tqdm=True)
    for (context, text), (value, _) in zip((("hello", " there"), ("a b", " c"), ("", "hello")), found, strict=True):
        before = talker.tokenizer.encode(context) if context else [0]
        tokens = before + talker.tokenizer.encode(text, add_special=False)
        assert value == pytest.approx(logprobs(talker, tokens)[len(before) - 1 :].sum(), abs=2e-4)


@pytest.mark.slow
def test_rolling_windows(talker, model):
    """100 tokens in windows that predict 40 tokens each, after at least one token of context.

    The last window overlaps the one before. Only its last 20 predictions count.
    """
    text = "abcdefghij" * 10
    tokens = [0, *talker.tokenizer.encode(text)]
    expected = logprobs(talker, tokens[:41]).sum() + logprobs(talker, tokens[40:81]).sum()
    expected += logprobs(talker, tokens[60:101])[-20:].sum()
    windows = [tokens[:41], tokens[40:81], tokens[60:101]]
    assert [len(w) for w in windows] == [41] * 3
    (whole,) = model.loglikelihood_rolling(requests((text,)))
    assert whole == pytest.approx(expected, abs=1e-3)
    # A budget of 1.0 keeps everything, so the result is the same.
    through = lm_harness.register()(talker, policy="streaming_llm", budget=1.0, max_length=40)
    (read,) = through.loglikelihood_rolling(requests((text,)))
    assert read == pytest.approx(expected, abs=1e-3)


def test_generation(talker, model):
    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    found = model.generate_until(requests(("hello", options), ("good day to you", options)))
    for prompt, text in zip(("hello", "good day to you"), found, strict=True):
        assert text == kvjax.generate(talker, prompt, max_new_tokens=6, stop="\n").text


def test_what_it_refuses(talker, tiny):
    """Invalid arguments raise before the model is looked for: "nowhere" does not exist."""
    for arguments, says in (
        ({"batch_size": "auto"}, "batch_size='auto'"),
        ({"batch_size": 0}, "batch_size=0; give a number, 1 or more"),
        ({"max_length": 1}, "max_length=1; give a whole number, 2 or more"),
        ({"max_gen_toks": -1}, "max_gen_toks=-1; give a whole number, 1 or more"),
        ({"policy": "treekv", "budget": float("nan")}, "budget=nan"),
    ):
        with pytest.raises(ValueError, match=says):
            lm_harness.register()("nowhere", **arguments)
    with pytest.raises(ValueError, match="no tokenizer"):
        lm_harness.register()(tiny)
    with pytest.raises(kvjax.PolicyError, match="no hyperparameter"):
        lm_harness.register()(talker, policy="treekv", bugdet=3)


@pytest.mark.long
def test_agrees_with_hf_model(smollm2, shared, tmp_path):
    """Log-likelihoods of last words, as in LAMBADA, and rolling ones of WikiText, with the same float32 weights."""
    transformers = pytest.importorskip("transformers")
    from kvjax.conversion import convert

    convert(None, tmp_path / "hf", format="safetensors", dtype="float32")  # None: the default model, as `smollm2`
    theirs = pytest.importorskip("lm_eval.models.huggingface").HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
        max_length=1024,
        batch_size=1,
    )
    ours = lm_harness.register()(smollm2, max_length=1024, batch_size=2)
    text = (shared / "data/text/wikitext-2/test.txt").read_text()[:9000]
    sentences = [line for line in text.split(" . ") if len(line.split()) > 12][:12]
    pairs = [tuple(sentence.rsplit(" ", 1)) for sentence in sentences]
    last_words = requests(*((context, " " + word) for context, word in pairs))
    for mine, reference in zip(ours.loglikelihood(last_words), theirs.loglikelihood(last_words), strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=1e-3)
        assert mine[1] == reference[1]
    (mine,), (reference,) = (each.loglikelihood_rolling(requests((text,))) for each in (ours, theirs))
    assert mine == pytest.approx(reference, rel=1e-5)
