"""Samplers of one's own, grammars, and beam search, against greedy sampling, masks in NumPy, and a search without a cache."""

import dataclasses
import json
import re
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from checkpoints import HF_CONFIG, write_hf

import kvjax
from kvjax.runtime import decoding, sampling
from kvjax.runtime.beam import beam_search
from kvjax.runtime.engine import Engine
from kvjax.runtime.sampling import Constrained, Greedy, Masked, Sampling, make_sampler

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 64, size).tolist() for size in (21, 9, 14)]
OPTIONS = {"policy": "streaming_llm:12", "max_new_tokens": 12, "ignore_eos": True}


@flax.struct.dataclass
class Biased:
    """Greedy, with numbers that are added to the logits."""

    bias: jax.Array

    def __call__(self, logits, seed, pos):
        return jnp.argmax(logits + self.bias, axis=-1).astype(jnp.int32)


def second(logits, seed, pos):
    """The second most likely token."""
    return jax.lax.top_k(logits, 2)[1][:, 1]


def bits(allowed, vocabulary=64):
    """A bitmask, in NumPy."""
    flags = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def test_a_sampler_of_ones_own(tiny):
    """A function and a pytree, for all prompts; other numbers need no other program."""
    plain = kvjax.generate(tiny, PROMPTS, **OPTIONS)
    bias = np.zeros(64, np.float32)
    same = kvjax.generate(tiny, PROMPTS, sampler=Biased(bias), **OPTIONS)
    assert [r.tokens for r in same] == [r.tokens for r in plain]
    programs = len(decoding.decode.executables)
    bias[plain[0].tokens[0]] = -100
    other = kvjax.generate(tiny, PROMPTS, sampler=Biased(bias), **OPTIONS)
    assert len(decoding.decode.executables) == programs
    assert all(plain[0].tokens[0] not in r.tokens for r in other)
    ranks = kvjax.generate(tiny, PROMPTS[0], sampler=second, max_new_tokens=5, ignore_eos=True)
    ids = PROMPTS[0]
    for token in ranks.tokens:
        logits = np.asarray(oracles.logits(tiny, [ids]))[0, -1]
        assert token == np.argsort(-logits, kind="stable")[1]
        ids = [*ids, token]
    assert kvjax.generate(tiny, PROMPTS, sampler=Greedy(), **OPTIONS)[1].tokens == plain[1].tokens
    warm = {"temperature": 0.9, "top_k": 9}
    want = kvjax.generate(tiny, PROMPTS, seed=5, **warm, **OPTIONS)
    got = kvjax.generate(tiny, PROMPTS, seed=5, sampler=make_sampler(**warm), **OPTIONS)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    some = kvjax.iterate(tiny, PROMPTS, sampler=Biased(bias), rows=2, **OPTIONS)
    assert {i: r.tokens for i, r in some} == {i: r.tokens for i, r in enumerate(other)}


def test_a_bitmask_is_a_filter_of_logits():
    logits = jnp.asarray(RNG.normal(size=(3, 70)), jnp.float32)
    allowed = [[69, 3], range(70), [31, 32, 33]]
    seed, pos = jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32)
    mask = jnp.asarray(np.stack([bits(row, 70) for row in allowed]))
    got = Masked(Greedy(), mask)(logits, seed, pos)
    for row, token, some in zip(np.asarray(logits), got, allowed, strict=True):
        assert token == max(some, key=lambda i, row=row: row[i])
    sampling = Sampling(jnp.float32(1.0))
    assert Masked(sampling, mask)(logits, seed, pos)[1] == sampling(logits, seed, pos)[1]


def drawn_logits(size, kind):
    """Logits of seven rows: smooth, with ties, mostly minus infinity, with both zeros, huge, equal, and peaked."""
    random = np.random.default_rng(size + kind)
    logits = random.normal(0, 3, (7, size)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2, random.permutation(size)[: size - max(size // 4, 1)]] = -np.inf
    logits[3] = np.where(random.random(size) < 0.5, 0.0, -0.0) * np.where(random.random(size) < 0.9, 1, np.nan)
    logits[3] = np.nan_to_num(logits[3], nan=1.0)
    logits[4] = random.choice([np.finfo(np.float32).min, np.finfo(np.float32).max, 1e30, -1e30], size)
    logits[5] = random.normal()
    logits[6] *= 10
    return logits


def sorted_top_k(logits, k):
    """Tokens that are kept, by a sort."""
    return logits >= np.sort(logits)[::-1][min(k, len(logits)) - 1]


def sorted_top_p(logits, p):
    """The same. Also returns how near a sum of probabilities is to p, where rounding may change the set."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order].astype(np.float64) - logits.max())
    before = np.cumsum(probs) / probs.sum() - probs / probs.sum()
    return logits >= logits[order[np.flatnonzero(before < p)[-1]]], np.min(np.abs(before[1:] - p), initial=np.inf)


@pytest.mark.parametrize("size", [2, 5, 64, 1000, 30_000])
def test_filters_keep_what_a_sort_keeps(size):
    """Ties included. A row that is not filtered keeps all, whatever its neighbours do."""
    top_k, top_p = jax.jit(sampling._top_k), jax.jit(sampling._top_p)
    random, compared = np.random.default_rng(size), 0
    for kind in range(12):
        logits = drawn_logits(size, kind)
        ks = random.integers(1, size + 2, 7)
        ks[random.integers(7)] = np.iinfo(np.int32).max
        kept = np.asarray(top_k(logits, jnp.asarray(ks, jnp.int32)[:, None]))
        for row, k, found in zip(logits, ks.tolist(), kept, strict=True):
            np.testing.assert_array_equal(found, sorted_top_k(row, k))
        ps = random.uniform(0.001, 0.999, 7).astype(np.float32)
        ps[random.integers(7)] = 1.0
        kept = np.asarray(top_p(logits, ps[:, None]))
        for row, p, found in zip(logits, ps.tolist(), kept, strict=True):
            want, gap = sorted_top_p(row, p)
            if p == 1:
                assert found.all()
            elif gap > 1e-5:
                compared += 1
                np.testing.assert_array_equal(found, want)
        none = np.full(7, np.iinfo(np.int32).max, np.int32), np.ones(7, np.float32)
        assert all(np.asarray(keep(logits, x[:, None])).all() for keep, x in zip((top_k, top_p), none, strict=True))
    assert compared > 30


class Alternating:
    """Even and odd tokens in turn. It notes what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens):
        self.calls.append(list(tokens))
        return bits(range(len(tokens) % 2, 64, 2))


@pytest.mark.parametrize("options", [{}, {"question": [[1, 2, 3], [4], [5]]}, {"prefill_block": 8}])
def test_a_grammar_restricts_its_row_alone(tiny, options):
    """Rows without a grammar have the same tokens and log-probabilities, bit for bit, whatever their neighbours' grammars."""
    grammar = Alternating()
    free = kvjax.generate(tiny, PROMPTS, sampler=Constrained([None] * 3), **OPTIONS, **options)
    plain = kvjax.generate(tiny, PROMPTS, **OPTIONS, **options)
    got = kvjax.generate(tiny, PROMPTS, sampler=Constrained([None, grammar, None]), **OPTIONS, **options)
    assert [r.tokens for r in free] == [r.tokens for r in plain]
    for row in (0, 2):
        assert (got[row].tokens, got[row].logprobs) == (free[row].tokens, free[row].logprobs)
    assert [token % 2 for token in got[1].tokens] == [i % 2 for i in range(12)]
    assert grammar.calls == [got[1].tokens[:i] for i in range(12)]  # once before each token
    asked = {name: value[1] if name == "question" else value for name, value in options.items()}
    alone = kvjax.generate(tiny, PROMPTS[1], sampler=Constrained([Alternating()]), **OPTIONS, **asked)
    assert alone.tokens == got[1].tokens


def test_a_constrained_text_is_the_best_allowed_one(tiny):
    """Against logits without a cache."""
    reply = kvjax.generate(tiny, PROMPTS[0], sampler=Constrained([Alternating()]), max_new_tokens=6, ignore_eos=True)
    ids = PROMPTS[0]
    for i, token in enumerate(reply.tokens):
        logits = np.asarray(oracles.logits(tiny, [ids]))[0, -1]
        assert token == max(range(i % 2, 64, 2), key=lambda t, logits=logits: logits[t])
        ids = [*ids, token]


def test_the_example_of_a_json_schema(tmp_path):
    """The class on the page, with a random model: the text is JSON of the schema, and its neighbour writes what it likes."""
    pytest.importorskip("llguidance")
    page = (Path(__file__).parents[1] / "docs" / "howto" / "sampling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = next(block for block in blocks if "class JsonSchema" in block)
    schema = next(block for block in blocks if "x-guidance" in block).partition("result =")[0]
    names: dict = {}
    exec(compile(code + schema, "sampling.md", "exec"), names)
    write_hf(tmp_path / "small", HF_CONFIG | {"max_position_embeddings": 512}, tokenizer=True)
    params = kvjax.load(tmp_path / "small")
    grammar = names["JsonSchema"](params, names["schema"])
    options = {"max_new_tokens": 60, "policy": "streaming_llm:24"}
    result, other = kvjax.generate(params, ["Call me", "Name"], sampler=Constrained([grammar, None]), **options)
    found = json.loads(result.text)
    assert set(found) == {"name", "age"}
    assert found["name"] in ("Ishmael", "Ahab")
    assert 0 <= found["age"] <= 99
    assert result.stop_reason == "eos"
    assert other.tokens == kvjax.generate(params, "Name", **options).tokens


def test_what_samplers_refuse(tiny):
    for sampler, says in (
        (5, r"sampler is 5 \(int\); give one sampler for all prompts"),
        ([Greedy()] * 3, "give one sampler for all prompts"),
        (
            lambda logits, seed, pos: logits,
            r"sampler returned float32\[1, 64\] for one row of logits; return one token id",
        ),
        (lambda logits, seed, pos: None, "sampler returned None"),
        (Sampling(jnp.ones(3)), r"sampler cannot be called with logits of one row, \[1, 64\]"),
        (Biased(bias="text"), "among its leaves; give arrays and numbers"),
        (Constrained([None]), "sampler has 1 grammars, but there are 3 prompts"),
        (Constrained([None, lambda tokens: [1.5], None]), r"the grammar of prompt 2 returned float64\[1\]"),
        (Constrained([lambda tokens: np.zeros(2, np.uint32), None, None]), "the grammar of prompt 1 allows no token"),
    ):
        with pytest.raises(ValueError, match=says):
            kvjax.generate(tiny, PROMPTS, sampler=sampler, **OPTIONS)
    with pytest.raises(ValueError, match="return_state=True is not supported with a sampler of one's own"):
        kvjax.generate(tiny, PROMPTS, sampler=second, return_state=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"sampler and top_k=3 are given; omit top_k"):
        kvjax.generate(tiny, PROMPTS, sampler=Greedy(), top_k=3, **OPTIONS)


def search(logits_of, prompt, count, beams, end=None):
    """Beam search in NumPy, from a function that gives the logits after a whole text."""
    kept = [(0.0, [])]
    for _ in range(count):
        found = []
        for score, tokens in kept:
            if tokens and tokens[-1] == end:
                found.append((score, tokens))
                continue
            logits = np.asarray(logits_of([*prompt, *tokens]), np.float64)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            found += [(score + logprobs[token], [*tokens, token]) for token in range(len(logprobs))]
        kept = sorted(found, key=lambda each: -each[0])[:beams]
    return kept


def stepwise(params, policy, prompt, count):
    """Logits after a text: the prompt is prefilled and compressed, the rest is processed token by token, in a cache of its own."""
    engine = Engine(params, policy, prompt_len=len(prompt), max_new_tokens=count)
    state, _ = engine.prefill([prompt])
    step = jax.jit(decoding.step, static_argnums=(0, 1))
    first = np.asarray(oracles.logits(params, [prompt]))[0, -1]

    def after(ids):
        caches, logits = jax.tree.map(jnp.copy, state.caches), [first]
        for i in range(len(prompt), len(ids)):
            at = jnp.asarray([ids[i]], jnp.int32), jnp.asarray([i], jnp.int32)
            logits, caches = step(engine.policy, engine.specs, params, caches, *at)
        return logits[0]

    return after


@pytest.mark.parametrize("policy", ["full", "streaming_llm:12", "treekv:12", "snapkv:12,window=4"])
def test_beam_search_is_the_search_without_shared_caches(tiny, policy):
    prompt, count = PROMPTS[0], 6
    logits_of = stepwise(tiny, policy, prompt, count)
    if policy == "full":
        logits_of = lambda ids: np.asarray(oracles.logits(tiny, [ids]))[0, -1]  # noqa: E731 - an oracle of its own
    want = search(logits_of, prompt, count, 3)
    found = beam_search(tiny, prompt, policy, max_new_tokens=count, beams=3, ignore_eos=True)
    assert [reply.tokens for reply in found] == [tokens for _, tokens in want]
    np.testing.assert_allclose([sum(reply.logprobs) for reply in found], [score for score, _ in want], atol=2e-5)
    assert {reply.stop_reason for reply in found} == {"length"}


def test_beams_that_end(letters):
    """They keep their place. The end token is the one that most beams choose, so that some end early."""
    prompt, count = PROMPTS[0], 6
    logits_of = lambda ids: np.asarray(oracles.logits(letters, [ids]))[0, -1]  # noqa: E731
    free = search(logits_of, prompt, count, 4)
    end = free[1][1][2]
    params = letters.replace(config=dataclasses.replace(letters.config, eos=(end,)))
    want = search(logits_of, prompt, count, 4, end)
    found = beam_search(params, prompt, max_new_tokens=count, beams=4)
    assert [reply.tokens for reply in found] == [tokens for _, tokens in want]
    assert {reply.stop_reason for reply in found} == {"eos", "length"}
    assert all(reply.text == letters.tokenizer.decode(reply.tokens) for reply in found)


def test_one_beam_is_greedy(tiny):
    (reply,) = beam_search(tiny, PROMPTS[0], OPTIONS["policy"], max_new_tokens=12, beams=1, ignore_eos=True)
    want = kvjax.generate(tiny, PROMPTS[0], **OPTIONS)
    assert reply.tokens == want.tokens
    np.testing.assert_allclose(reply.logprobs, want.logprobs, atol=2e-5)
    for options, says in (({"beams": 0}, "beams=0"), ({"beams": 65}, "beams=65; give at most the vocabulary, 64")):
        with pytest.raises(ValueError, match=says):
            beam_search(tiny, PROMPTS[0], **options)


def test_rows_are_reordered(tiny):
    engine = Engine(tiny, "streaming_llm:12", batch=3, prompt_len=21, max_new_tokens=8)
    state, _ = engine.prefill(PROMPTS)
    mixed = engine.reorder(state, [2, 0, 2])
    _, tokens, _ = engine.decode(state, 5)
    _, other, _ = engine.decode(mixed, 5)
    np.testing.assert_array_equal(np.asarray(other)[:, :5], np.asarray(tokens)[[2, 0, 2], :5])
    state, _ = engine.prefill(PROMPTS)
    for rows, says in (([0, 1], "give a list of 3"), ([0, 1, 3], "rows has 3, but the rows of this engine are 0 to 2")):
        with pytest.raises(ValueError, match=says):
            engine.reorder(state, rows)
