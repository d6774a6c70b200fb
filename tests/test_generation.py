"""`generate` and `stream`: what goes in, what comes out, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax import cache, decoding
from kvjax.conversion import Tokenizer
from kvjax.models import transformer
from kvjax.sampling import Sample, make_sampler

PROMPT = [5, 9, 2, 7, 7, 1, 30, 12]


@pytest.fixture(scope="module")
def letters(tiny):
    """The tiny model with a tokenizer: ids 0 to 61 are letters and digits, 62 is a space, 63 ends a text."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {" ": 62, "<end>": 63}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = Tokenizer(backend, eos=(63,), chat_template=template)
    return tiny.replace(tokenizer=tokenizer, config=dataclasses.replace(tiny.config, eos=(63,)))


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


def test_seeds(tiny):
    options = {"max_new_tokens": 16, "temperature": 1.0}
    first = kvjax.generate(tiny, PROMPT, seed=1, **options).tokens
    assert kvjax.generate(tiny, PROMPT, seed=1, **options).tokens == first
    assert kvjax.generate(tiny, PROMPT, seed=2, **options).tokens != first
    same = kvjax.generate(tiny, [PROMPT, PROMPT], seed=1, **options)
    assert same[0].tokens == first != same[1].tokens


def test_longrope_rows_keep_their_own_rotation(tiny):
    """Rows on both sides of the original window: each as alone."""
    from kvjax.models.rope import LongRope, RopeConfig

    scaling = LongRope((1.0,) * 8, tuple(1.0 + i for i in range(8)), original_max_position=20, factor=8.0)
    params = tiny.replace(config=dataclasses.replace(tiny.config, rope=RopeConfig(1e4, 16, scaling=scaling)))
    prompts = [PROMPT, PROMPT * 4, PROMPT[:2]]
    together = kvjax.generate(params, prompts, max_new_tokens=8)
    for prompt, row in zip(prompts, together, strict=True):
        assert kvjax.generate(params, prompt, max_new_tokens=8).tokens == row.tokens


def test_cache_reaches_beyond_the_trained_window_only_with_a_word(tiny):
    prompt = PROMPT * 31
    with pytest.warns(UserWarning, match="beyond the 256"):
        kvjax.generate(tiny, prompt, max_new_tokens=9)
    kvjax.generate(
        tiny, prompt, max_new_tokens=9, policy="treekv", budget=64
    )  # positions stay in the cache: no warning


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
        (PROMPT, {"policy": "full", "budget": -5}, "full: budget=-5; give a positive"),
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
    assert isinstance(sampler, Sample)
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (count, 5))
    drawn = jax.jit(sampler.__call__)(logits, jnp.arange(count, dtype=jnp.uint32), jnp.full((count,), 7, jnp.int32))
    frequency = np.bincount(np.asarray(drawn), minlength=5) / count
    np.testing.assert_allclose(frequency, expected, atol=0.015)
    assert (frequency[np.asarray(expected) == 0] == 0).all()


def test_prompts_share_buckets(tiny):
    assert cache.bucket(5) == cache.bucket(60) == 64
    before = len(decoding.prefill.executables)
    for prompt in ([1] * 33, [2] * 64, [3]):
        kvjax.generate(tiny, prompt, max_new_tokens=3, policy=kvjax.StreamingLLM(budget=11))
    assert len(decoding.prefill.executables) == before + 1
