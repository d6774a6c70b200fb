"""Tests of `kvjax.evals.lm_harness`, kvjax as a model of lm-evaluation-harness.

Log-likelihoods are compared with those computed from full logits, generated texts with `kvjax.generate`, and a real
model with the harness's own `hf` model.

Fixtures of `conftest.py`: `talker` is a random Llama with a tokenizer and a window of 8192 tokens, `tiny` is a random
model without a tokenizer, and `smollm2` is the default model in float32.
"""

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import logits as logits_of

import kvjax
from kvjax.config import Yarn
from kvjax.conversion import Tokenizer
from kvjax.evals import Format, lm_harness, ruler
from kvjax.evals.ruler.scoring import match_all

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


CONVERSATION = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "The best answer is"}]


def test_a_prefix_of_the_answer_stays_open(model):
    """Tasks with `gen_prefix`, such as all of RULER, begin the assistant's message. The model continues it."""
    text = model.apply_chat_template(CONVERSATION, add_generation_prompt=False)
    assert text == "<|user|>What is 2+2?</s>\n<|assistant|>The best answer is"
    text = model.apply_chat_template(CONVERSATION[:1])
    assert text == "<|user|>What is 2+2?</s>\n<|assistant|>"


def test_a_refused_system_message_is_left_out(talker):
    """As Gemma's template refuses it."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer = talker.tokenizer
    other = Tokenizer(tokenizer.backend, eos=tokenizer.eos, chat_template=refusing + tokenizer.chat_template)
    model = lm_harness.register()(talker, tokenizer=other)
    with pytest.warns(UserWarning, match="system message is left out: .*System role not supported"):
        text = model.apply_chat_template([{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]])
    assert text == model.apply_chat_template(CONVERSATION[:1])
    without = Tokenizer(tokenizer.backend, eos=tokenizer.eos)
    with pytest.raises(ValueError, match="no chat template"):
        lm_harness.register()(talker, tokenizer=without).apply_chat_template([{"role": "system", "content": "x"}])


SAMPLED = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 4}


def test_repeats_are_different_samples(talker):
    """pass@k and maj@k ask the same prompt k times."""
    model = lm_harness.register()(talker, max_length=40, batch_size=4)
    assert len(set(model.generate_until(requests(*[("hello", SAMPLED)] * 8)))) == 8


def test_every_request_has_a_seed_of_its_own(talker, monkeypatch):
    """Seeds follow from the request's number, whatever its batch, its length, and the calls before."""
    seeds = []

    def answer(params, prompts, seed, **options):
        seeds.extend(zip(seed, map(len, prompts), strict=True))
        return [SimpleNamespace(tokens=[5]) for _ in prompts]

    def seeds_of(model, options=SAMPLED):
        seeds.clear()
        model.generate_until(requests(*(("hello" * size, options) for size in (1, 20, 1, 20))))
        return sorted(seeds)

    monkeypatch.setattr(lm_harness, "generate", answer)
    made = lm_harness.register()
    model = made(talker, seed=7)
    assert [seed for seed, _ in seeds_of(model)] == [7, 8, 9, 10]
    assert [size for _, size in seeds_of(model)] == [size for _, size in seeds_of(made(talker, batch_size=1))]
    assert [seed for seed, _ in seeds_of(model)] == [15, 16, 17, 18]
    assert seeds_of(made(talker), SAMPLED | {"seed": 100})[0][0] == 100
    default = []
    for seed in (5, 5, 6):  # the harness's --seed
        random.seed(seed)
        default.append(made(talker).seed)
    assert default[0] == default[1] != default[2]


def test_generation_arguments(model):
    """They are normalised as for the harness's own models."""
    for names in ({"max_completion_tokens": 7}, {"max_gen_toks": None, "max_tokens": 7}, {"max_new_tokens": 7}):
        assert model._options({"until": "x"} | names)["max_new_tokens"] == 7
    assert model._options({})["max_new_tokens"] == 256
    sampled = {"do_sample": True, "top_k": 0, "top_p": 0.9}
    assert model._options(sampled) == model._options({}) | {
        "temperature": 1.0,
        "top_k": None,
        "top_p": 0.9,
        "min_p": None,
    }
    assert model._options({"temperature": 0.8})["temperature"] == 0.8
    assert model._options({"do_sample": False, "temperature": 0.8})["temperature"] == 0
    with pytest.warns(UserWarning, match=r"does not have are ignored: \{'num_beams': 4\}"):
        model._options({"num_beams": 4})


def test_contexts_and_continuations_that_the_harness_refuses(talker, model):
    """Both asserts of the harness's `hf` model: no context, and no continuation."""
    found = model.loglikelihood(requests(("   ", "x y"), ("", "   x y"), ("he", "ll")), disable_tqdm=True)
    assert found[0] == found[1], "a context of white space is an empty one"
    alone = [*talker.tokenizer.encode("he"), *talker.tokenizer.encode("ll", add_special=False)]
    assert len(talker.tokenizer.encode("hell")) == 1
    assert found[2][0] == pytest.approx(logprobs(talker, alone).sum(), abs=2e-4)
    with pytest.raises(ValueError, match="a continuation has 41 tokens, but max_length=40"):
        model.loglikelihood(requests(("hello", "x" * 41)), disable_tqdm=True)


def test_bos_is_not_predicted(shared):
    """A Llama tokenizer adds BOS, which is already the context of the first token."""
    params = kvjax.load(shared / "data/models/stories260K-hf", dtype="float32")
    text = "Once upon a time there was a dog."
    tokens = params.tokenizer.encode(text)
    assert tokens[0] == params.tokenizer.bos
    model = lm_harness.register()(params)
    assert model.loglikelihood_rolling(requests((text,))) == [pytest.approx(logprobs(params, tokens).sum(), abs=1e-3)]
    # SentencePiece drops the space at the beginning of a text, which is the answer alone.
    (answer,) = model.generate_until(requests(("Once upon a time, there was a girl named", {"max_gen_toks": 4})))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(shared / "data/models/stories260K-hf")
    tokens = kvjax.generate(params, "Once upon a time, there was a girl named", max_new_tokens=4).tokens
    assert answer == theirs.decode(tokens, skip_special_tokens=True)
    assert not answer.startswith(" ")


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


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    """The harness's `hf` model with the weights of `smollm2`, for at most 1024 tokens."""
    transformers = pytest.importorskip("transformers")
    from kvjax.conversion import convert

    path = tmp_path_factory.mktemp("hf") / "hf"
    convert(None, path, format="safetensors", dtype="float32")  # None: the default model, as `smollm2`
    return pytest.importorskip("lm_eval.models.huggingface").HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(path),
        max_length=1024,
        batch_size=1,
    )


@pytest.mark.long
def test_ruler_scores_as_with_hf_model(smollm2, hf_model, tmp_path):
    """Tasks with `gen_prefix` and a chat template, through the harness: the same prompts, answers and scores.

    The harness's own RULER tasks download their texts, so these are kvjax's with their form.
    """
    form, rows = Format(smollm2.tokenizer), []
    for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"):
        for example in ruler.ruler(name, 900, samples=3).examples(form):
            text = example.context + example.question
            rows.append({"input": text, "gen_prefix": example.prefix.strip(), "outputs": list(example.answers)})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "ruler_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "process_results": lambda doc, results: {"score": match_all(results[0], doc["outputs"])},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"do_sample": False, "temperature": 0.0, "max_gen_toks": 48, "until": []},
        "repeats": 1,
    }
    found = []
    for model in (lm_harness.register()(smollm2, max_length=1024, batch_size=2), hf_model):
        result = lm_eval.simple_evaluate(model=model, tasks=[dict(task)], apply_chat_template=True, bootstrap_iters=0)
        samples = sorted(result["samples"]["ruler_here"], key=lambda sample: sample["doc_id"])
        prompts = [sample["arguments"][0][0] for sample in samples]
        found.append(
            (prompts, [sample["resps"][0][0] for sample in samples], result["results"]["ruler_here"]["score,none"])
        )
    assert all(prompt.endswith(row["gen_prefix"]) for prompt, row in zip(found[0][0], rows, strict=True))
    assert found[0] == found[1]
    assert found[0][2] > 0.2


@pytest.mark.long
def test_agrees_with_hf_model(smollm2, hf_model, shared):
    """Log-likelihoods of last words, as in LAMBADA, and rolling ones of WikiText, with the same float32 weights."""
    theirs, ours = hf_model, lm_harness.register()(smollm2, max_length=1024, batch_size=2)
    text = (shared / "data/text/wikitext-2/test.txt").read_text()[:9000]
    sentences = [line for line in text.split(" . ") if len(line.split()) > 12][:12]
    pairs = [tuple(sentence.rsplit(" ", 1)) for sentence in sentences]
    last_words = requests(*((context, " " + word) for context, word in pairs))
    for mine, reference in zip(ours.loglikelihood(last_words), theirs.loglikelihood(last_words), strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=1e-3)
        assert mine[1] == reference[1]
    (mine,), (reference,) = (each.loglikelihood_rolling(requests((text,))) for each in (ours, theirs))
    assert mine == pytest.approx(reference, rel=1e-5)
