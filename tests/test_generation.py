"""`generate` and `stream`: what goes in, what comes out, what is refused."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import kvjax
from kvjax import cache
from kvjax.config import LongRope, RopeConfig
from kvjax.conversion import Tokenizer
from kvjax.models import transformer
from kvjax.runtime import decoding
from kvjax.runtime.sampling import Sampling, make_sampler

PROMPT = [5, 9, 2, 7, 7, 1, 30, 12]


def test_greedy_is_the_argmax_of_the_forward_pass(tiny):
    result = kvjax.generate(tiny, PROMPT, max_new_tokens=12)
    tokens = list(PROMPT)
    forward = jax.jit(transformer.forward)
    for token, logprob in zip(result.tokens, result.logprobs, strict=True):
        padded = np.pad(tokens, (0, len(PROMPT) + 12 - len(tokens)))[None]  # what follows a token does not change it
        logits = np.asarray(forward(tiny, jnp.asarray(padded, jnp.int32)))[0, len(tokens) - 1]
        assert token == logits.argmax()
        assert logprob == pytest.approx(logits.max() - np.log(np.exp(logits.astype(np.float64)).sum()), abs=1e-4)
        tokens.append(token)
    assert (len(result.tokens), result.stop_reason, result.text) == (12, "length", None)


def test_stats(tiny):
    stats = kvjax.generate(tiny, [PROMPT, PROMPT[:3]], policy="treekv", budget=8, max_new_tokens=6)[1].stats
    assert (stats.prompt_tokens, stats.new_tokens) == (11, 12)
    assert (
        stats.cache_bytes == kvjax.TreeKV(budget=8).nbytes(tiny.config, 2, 8, 6, jnp.float32) < stats.full_cache_bytes
    )
    assert stats.full_cache_bytes == kvjax.Full().nbytes(tiny.config, 2, 8, 6, jnp.float32)
    assert (stats.host_cache_bytes, stats.step_bytes_read, stats.hit_rate) == (0, stats.cache_bytes, None)
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.prefill_tokens_per_second == pytest.approx(11 / stats.prefill_seconds)


def test_rows_stop_at_their_own_end(tiny):
    """Each row ends at the first end token it draws; the others go on."""
    free = kvjax.generate(tiny, [PROMPT, PROMPT[:3], PROMPT[2:]], max_new_tokens=20)
    end = free[0].tokens[4]
    params = tiny.replace(config=dataclasses.replace(tiny.config, eos=(end,)))
    for got, all_of_it in zip(
        kvjax.generate(params, [PROMPT, PROMPT[:3], PROMPT[2:]], max_new_tokens=20), free, strict=True
    ):
        if end in all_of_it.tokens:
            assert got.tokens == all_of_it.tokens[: all_of_it.tokens.index(end) + 1]
            assert got.stop_reason == "eos"
        else:
            assert (got.tokens, got.stop_reason) == (all_of_it.tokens, "length")
    ignored = kvjax.generate(params, PROMPT, max_new_tokens=20, ignore_eos=True)
    assert (ignored.tokens, ignored.stop_reason) == (free[0].tokens, "length")


def test_more_tokens_than_a_chunk_and_a_prompt_that_ends_at_once(tiny):
    long = kvjax.generate(tiny, PROMPT, max_new_tokens=decoding.CHUNK + 20, policy="treekv", budget=16)
    assert len(long.tokens) == decoding.CHUNK + 20
    assert kvjax.generate(tiny, PROMPT, max_new_tokens=4, policy="treekv", budget=16).tokens == long.tokens[:4]
    assert kvjax.generate(tiny, PROMPT, max_new_tokens=1).tokens == long.tokens[:1]


def test_text_chat_and_ids_are_the_same_prompt(letters):
    text = kvjax.generate(letters, "fjchhb", max_new_tokens=6)
    assert kvjax.generate(letters, [5, 9, 2, 7, 7, 1], max_new_tokens=6) == dataclasses.replace(text, stats=ANY)
    assert kvjax.generate(letters, np.asarray([5, 9, 2, 7, 7, 1]), max_new_tokens=6).tokens == text.tokens
    chat = [{"role": "user", "content": "fj"}, {"role": "user", "content": "ch"}]
    both = kvjax.generate(letters, [chat, "fj ch "], max_new_tokens=6)
    assert both[0].tokens == both[1].tokens
    assert text.text == letters.tokenizer.decode(text.tokens)


class _Any:
    def __eq__(self, other):
        return True

    __hash__ = None


ANY = _Any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_pieces_are_the_text(letters, temperature):
    options = {"max_new_tokens": 30, "temperature": temperature, "ignore_eos": True}
    pieces = list(kvjax.stream(letters, "hello", **options))
    assert "".join(pieces) == kvjax.generate(letters, "hello", **options).text
    assert len(pieces) > 1


def test_stop_strings(letters):
    options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.5, "seed": 3}
    text = kvjax.generate(letters, "hello", **options).text
    stop = text[17:19]
    stopped = kvjax.generate(letters, "hello", stop=["never there", stop], **options)
    assert (stopped.text, stopped.stop_reason) == (text[: text.index(stop)], "stop")
    assert letters.tokenizer.decode(stopped.tokens) == stopped.text + stop
    assert "".join(kvjax.stream(letters, "hello", stop=stop, **options)) == stopped.text
    both = kvjax.generate(letters, ["hello", "world"], stop=stop, **options)
    assert both[0].text == stopped.text


def test_special_tokens_are_stop_strings(letters):
    """They are no part of a text, so rows end where they are sampled: with `ignore_eos` too, and each row by itself."""
    options = {"max_new_tokens": 40, "temperature": 1.5, "seed": 3}
    prompts = ["hello", "world"]
    free = kvjax.generate(letters, prompts, ignore_eos=True, **options)
    letter = letters.tokenizer.decode(free[0].tokens[17:18])
    backend = letters.tokenizer.backend.from_str(letters.tokenizer.backend.to_str())
    backend.add_special_tokens([letter])
    params = letters.replace(tokenizer=Tokenizer(backend, eos=(63,)))
    token = backend.token_to_id(letter)
    for stop in (letter, [letter], ["00", letter]):
        stopped = kvjax.generate(params, prompts, stop=stop, ignore_eos=True, **options)
        for got, whole in zip(stopped, free, strict=True):
            at = whole.tokens.index(token) if token in whole.tokens else 39
            assert got.tokens == whole.tokens[: at + 1]
            assert got.text == letters.tokenizer.decode(whole.tokens[:at] if at < 39 else whole.tokens)
            assert got.stop_reason == ("stop" if at < 39 else "length")
    assert "".join(kvjax.stream(params, "hello", stop=letter, ignore_eos=True, **options)) == stopped[0].text
    end = next(token for token in free[0].tokens if token != 63)
    model_end = params.replace(config=dataclasses.replace(params.config, eos=(end,)))
    assert kvjax.generate(model_end, "hello", stop=letter, **options).stop_reason == "eos"
    with pytest.raises(
        ValueError, match=r"stop='<end>x' contains the special token '<end>' and other text.*give '<end>' by itself"
    ):
        kvjax.generate(params, "hello", stop=["x", "<end>x"], **options)


def test_seeds(tiny):
    options = {"max_new_tokens": 16, "temperature": 1.0}
    first = kvjax.generate(tiny, PROMPT, seed=1, **options).tokens
    assert kvjax.generate(tiny, PROMPT, seed=1, **options).tokens == first
    assert kvjax.generate(tiny, PROMPT, seed=2, **options).tokens != first
    same = kvjax.generate(tiny, [PROMPT, PROMPT], seed=1, **options)
    assert same[0].tokens == first != same[1].tokens


@pytest.fixture(scope="module")
def longrope(letters):
    """The tiny model with other rotations beyond 20 tokens, so different that tokens differ."""
    scaling = LongRope((1.0,) * 8, tuple(4.0 + i for i in range(8)), original_max_position=20, factor=8.0)
    rope = RopeConfig(1e4, 16, scaling=scaling)
    return letters.replace(config=letters.config.with_attention(rope=rope))


def test_longrope_rows_keep_their_own_rotation(longrope):
    """Rows on both sides of the original window, and one that crosses it: each as alone."""
    prompts = [PROMPT, PROMPT * 4, PROMPT[:2], PROMPT * 2]
    together = kvjax.generate(longrope, prompts, max_new_tokens=8, ignore_eos=True)
    for prompt, row in zip(prompts, together, strict=True):
        alone = kvjax.generate(longrope, prompt, max_new_tokens=8, ignore_eos=True)
        assert (alone.tokens, len(alone.tokens)) == (row.tokens, 8)


@pytest.mark.parametrize("policy", ["full", "snapkv:12,window=4"])
def test_longrope_tokens_do_not_depend_on_how_many_are_asked_for(longrope, policy):
    """As long as all fit the original window they have the first rotation; beyond it all are read again with the second."""
    options = {"policy": policy, "ignore_eos": True}
    tokens = {n: kvjax.generate(longrope, PROMPT, max_new_tokens=n, **options).tokens for n in (3, 12, 15, 16, 40)}
    for n, found in tokens.items():
        assert found == tokens[40][:n]
    window = 20 + 1 - len(PROMPT)  # the last of them is not read
    scaling = longrope.config.rope.scaling
    for name, before in (("short_factor", []), ("long_factor", tokens[40][:window])):
        same = dataclasses.replace(scaling, short_factor=getattr(scaling, name), long_factor=getattr(scaling, name))
        params = longrope.replace(
            config=longrope.config.with_attention(rope=dataclasses.replace(longrope.config.rope, scaling=same))
        )
        found = kvjax.generate(params, PROMPT + before, max_new_tokens=40 - len(before), **options).tokens
        if before:
            assert found == tokens[40][window:]
        else:
            assert found[:window] == tokens[40][:window]
            assert found != tokens[40]
    result = kvjax.generate(longrope, PROMPT, max_new_tokens=40, **options)
    assert "".join(kvjax.stream(longrope, PROMPT, max_new_tokens=40, **options)) == result.text
    assert result.stats.cache_bytes <= 2 * result.stats.full_cache_bytes
    asked = kvjax.generate(longrope, PROMPT[:3], question=PROMPT[3:], max_new_tokens=20, **options | {"policy": "full"})
    if policy == "full":
        assert asked.tokens == tokens[40][:20]


def test_cache_reaches_beyond_the_trained_window_only_with_a_word(tiny):
    prompt = PROMPT * 31
    with pytest.warns(UserWarning, match="beyond the 256"):
        kvjax.generate(tiny, prompt, max_new_tokens=9)
    kvjax.generate(
        tiny, prompt, max_new_tokens=9, policy="treekv", budget=64
    )  # positions stay in the cache: no warning


def test_a_scaled_window_is_not_left(tiny):
    """YaRN by 4 makes four windows of one."""
    from kvjax.config import RopeConfig, Yarn

    rope = RopeConfig(1e4, 16, scaling=Yarn(4.0, 256))
    params = tiny.replace(config=tiny.config.with_attention(rope=rope))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.generate(params, PROMPT * 31, max_new_tokens=9)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "non-empty list"),
        (3.5, {}, "3.5 \\(float\\)"),
        ([[]], {}, "text, token ids or chat"),
        ([PROMPT, None], {}, "None"),
        ([5, 99], {}, "token id 99 is outside"),
        ("text", {}, "no tokenizer"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (PROMPT, {"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        (PROMPT, {"temperature": -1.0}, "temperature=-1"),
        (PROMPT, {"temperature": 1.0, "top_p": 0.0}, "top_p=0"),
        (PROMPT, {"temperature": 1.0, "top_k": 0}, "top_k=0"),
        (PROMPT, {"temperature": 1.0, "min_p": 2.0}, "min_p=2"),
        (PROMPT, {"stop": "x"}, "a model with a tokenizer"),
        (PROMPT, {"policy": "treekvv"}, "Did you mean 'treekv'"),
        (PROMPT, {"policy": "full", "budget": -5}, "full: budget=-5 is not valid. Give a positive"),
        (PROMPT, {"policy": 7}, "policy=7"),
        (PROMPT, {"policy": "treekv", "budget": 0.02}, "gives 2 slots"),
    ],
)
def test_refusals(tiny, prompt, options, says):
    with pytest.raises(ValueError, match=says):
        kvjax.generate(tiny, prompt, **options)


def test_stream_wants_one_prompt_and_a_tokenizer(tiny, letters):
    with pytest.raises(ValueError, match="one prompt"):
        next(kvjax.stream(letters, ["a", "b"]))
    with pytest.raises(ValueError, match="no tokenizer"):
        next(kvjax.stream(tiny, PROMPT))


LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"min_p": 0.3}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"top_k": 3, "min_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"temperature": 0.5}, np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / np.square([0.4, 0.3, 0.15, 0.1, 0.05]).sum()),
    ],
)
def test_what_samplers_draw(options, expected):
    """Frequencies of 20 000 draws."""
    sampler = make_sampler(**{"temperature": 1.0} | options)
    assert isinstance(sampler, Sampling)
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (count, 5))
    drawn = jax.jit(sampler.__call__)(logits, jnp.arange(count, dtype=jnp.uint32), jnp.full((count,), 7, jnp.int32))
    frequency = np.bincount(np.asarray(drawn), minlength=5) / count
    np.testing.assert_allclose(frequency, expected, atol=0.015)
    assert (frequency[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1, 2}),  # the second and the third are equal
        ({"top_p": 0.5}, {0}),
        ({"top_p": 1.0}, {0, 1, 2}),
        ({"min_p": 0.0}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_filters_at_their_edges(options, allowed):
    """Of probabilities that are a half, a quarter and a quarter, in floating point too."""
    sampler = make_sampler(temperature=1.0, **options)
    logits = jnp.broadcast_to(jnp.asarray([np.log(2), 0.0, 0.0], jnp.float32), (100, 3))
    assert jax.nn.softmax(logits[0]).tolist() == [0.5, 0.25, 0.25]
    drawn = sampler(logits, jnp.arange(100, dtype=jnp.uint32), jnp.zeros((100,), jnp.int32))
    assert set(drawn.tolist()) == allowed


def test_prompts_share_buckets(tiny):
    assert cache.bucket(5) == cache.bucket(60) == 64
    before = len(decoding.prefill.executables)
    for prompt in ([1] * 33, [2] * 64, [3]):
        kvjax.generate(tiny, prompt, max_new_tokens=3, policy=kvjax.StreamingLLM(budget=11))
    assert len(decoding.prefill.executables) == before + 1


def small_tokenizer(kind):
    """64 ids: a space, letters, and the bytes of é, €, 😀 and a few that fit nowhere, by the three kinds of vocabularies."""
    data = [0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF]
    letters = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVW"]
    if kind == "byte-level":
        seen = {byte: chr(byte) for byte in (*range(161, 173), *range(174, 256))}
        shown = [seen.get(byte, chr(256 + 33 + byte - 127)) for byte in data]  # as GPT-2 spells them
        words, decoder = ["Ġ", *shown, "Ġan", "Ġthe"], decoders.ByteLevel()
    else:
        strip = [decoders.Strip(content=" ", left=1)] if kind == "leading space" else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        words = ["▁", *(f"<0x{byte:02X}>" for byte in data), "▁an", "▁the"]
        decoder = decoders.Sequence(steps)
    texts = [*words, *letters]
    backend = tokenizers.Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, "a"))
    backend.decoder = decoder
    backend.add_tokens([" added "])
    backend.add_special_tokens(["<end>"])
    assert backend.get_vocab_size() == 64
    return Tokenizer(backend)


@pytest.mark.parametrize("kind", ["byte-level", "leading space", "no leading space"])
def test_streamed_text_is_the_text_of_all_tokens(tiny, kind):
    """Of characters in pieces, broken ones, special and added tokens; also where the prompt ends in the middle of one."""
    params = tiny.replace(tokenizer=small_tokenizer(kind))
    decode = params.tokenizer.decode
    broken = 0
    for seed in range(25):
        prompt = [40, 0, 30, *range(1, 1 + seed % 10)]
        options = {"max_new_tokens": 30, "temperature": 1.5, "seed": seed}
        whole = kvjax.generate(params, prompt, **options)
        both, before = decode(prompt + whole.tokens), decode(prompt)
        text = both[len(before) :] if both.startswith(before) else decode(whole.tokens)
        assert whole.text == text == "".join(kvjax.stream(params, prompt, **options))
        broken += "\ufffd" in text
        stop = [text[7:9], text[12:13]]
        stopped = kvjax.generate(params, prompt, stop=stop, **options)
        assert stopped.text == text[: min(text.index(string) for string in stop)]
        assert stopped.text == "".join(kvjax.stream(params, prompt, stop=stop, **options))
    assert broken


def test_streaming_costs_the_same_after_a_long_prompt(letters, monkeypatch):
    """Tokens that are decoded to make text of 30, by what came before."""
    decoded, usual = [], Tokenizer.decode

    def counting(self, ids, **options):
        decoded.append(len(ids))
        return usual(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    costs = []
    for size in (20, 200):
        for stop in ((), ("never there",)):
            decoded.clear()
            list(kvjax.stream(letters, "a" * size, max_new_tokens=30, ignore_eos=True, temperature=1.5, stop=stop))
            costs.append(sum(decoded))
            decoded.clear()
            kvjax.generate(letters, "a" * size, max_new_tokens=30, ignore_eos=True, temperature=1.5, stop=stop)
            costs.append(sum(decoded))
    assert max(costs) < 20 * 30
    talk = kvjax.Session(letters, "a" * 200, max_new_tokens=40)
    decoded.clear()
    talk.generate("and", 30, ignore_eos=True)
    assert sum(decoded) < 20 * 30
