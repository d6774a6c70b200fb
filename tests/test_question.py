"""A question that comes after the prompt has been compressed, against one token at a time by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine

STEP = jax.jit(decoding.step, static_argnums=(0, 1))

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 64, size).tolist() for size in (60, 41, 52)]
QUESTIONS = [RNG.integers(0, 64, size).tolist() for size in (9, 1, 4)]
POLICIES = [
    kvjax.StreamingLLM(budget=24),
    kvjax.ChunkKV(budget=0.3, chunk=4, window=4),
]
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


def by_hand(params, prompt, question, policy):
    """Prefill alone, then the decode step for every token of the question and every generated token."""
    policy = policy.bind(params.config)
    engine = Engine(params, policy, prompt_len=len(prompt), max_new_tokens=len(question) + 12)
    specs, (state, _) = engine.specs, engine.prefill([prompt])
    caches, sampled, reading = state.caches, [], list(question)
    for pos in range(len(prompt), len(prompt) + len(question) + 11):
        token = jnp.asarray([reading.pop(0)], jnp.int32)
        logits, caches = STEP(policy, specs, params, caches, token, jnp.asarray([pos], jnp.int32))
        if not reading:
            sampled.append(int(jnp.argmax(logits[0])))
            reading.append(sampled[-1])
    return sampled


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.info.name)
def test_rows_read_their_questions_and_go_on(tiny, policy):
    """Ragged prompts and questions in one batch: each row gets what its prompt, compressed alone, goes on to."""
    results = kvjax.generate(tiny, PROMPTS, policy, question=QUESTIONS, **OPTIONS)
    for prompt, question, result in zip(PROMPTS, QUESTIONS, results, strict=True):
        assert result.tokens == by_hand(tiny, prompt, question, policy)
        assert len(result.logprobs) == 12
    stats = results[0].stats
    assert (stats.prompt_tokens, stats.question_tokens, stats.new_tokens) == (153, 14, 36)


def test_with_the_full_cache_a_question_is_more_prompt(tiny):
    whole = kvjax.generate(tiny, [p + q for p, q in zip(PROMPTS, QUESTIONS, strict=True)], **OPTIONS)
    asked = kvjax.generate(tiny, PROMPTS, question=QUESTIONS, **OPTIONS)
    for a, b in zip(whole, asked, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=5e-5)


def test_what_is_kept_does_not_depend_on_the_question(tiny):
    """A window policy keeps the prompt's last tokens, not the question's: it answers otherwise than if it had seen both."""
    policy = kvjax.ChunkKV(budget=16, chunk=4, window=4)
    aware = kvjax.generate(tiny, PROMPTS[0] + QUESTIONS[0], policy, **OPTIONS)
    blind = kvjax.generate(tiny, PROMPTS[0], policy, question=QUESTIONS[0], **OPTIONS)
    assert np.abs(np.asarray(aware.logprobs) - blind.logprobs).max() > 1e-3


@pytest.mark.parametrize("question", ["who", "the facts", "\N{OBJECT REPLACEMENT CHARACTER}", [5, 6]])
def test_a_question_after_a_chat_is_part_of_the_users_message(letters, question):
    """As if it had been there from the beginning; the template's end of the message is read with it."""
    facts, asked = "the facts ", question if isinstance(question, str) else "fg"
    chat = [{"role": "system", "content": "a b"}, {"role": "user", "content": facts}]
    whole = [chat[0], {"role": "user", "content": facts + asked}]
    for messages, wanted in ((chat, whole), (chat[:1], [chat[0], {"role": "user", "content": asked}])):
        got = kvjax.generate(letters, messages, question=question, **OPTIONS)
        want = kvjax.generate(letters, wanted, **OPTIONS)
        assert got.tokens == want.tokens
        assert got.stats.question_tokens == len(asked) + 1
        assert got.stats.prompt_tokens + got.stats.question_tokens == want.stats.prompt_tokens
    several = kvjax.generate(letters, [chat, "the facts"], question=[question, "who"], **OPTIONS)
    assert several[0].tokens == kvjax.generate(letters, whole, **OPTIONS).tokens


def test_long_answers_go_on_past_one_call(tiny, set_chunk):
    expected = kvjax.generate(tiny, PROMPTS, question=QUESTIONS, **OPTIONS)
    set_chunk(5)
    assert [r.tokens for r in kvjax.generate(tiny, PROMPTS, question=QUESTIONS, **OPTIONS)] == [
        r.tokens for r in expected
    ]
    assert not decoding.decode.executables  # the program that reads the question goes on


@pytest.mark.parametrize(
    ("prompt", "question", "says"),
    [
        (PROMPTS, QUESTIONS[:2], "a list of 3"),
        (PROMPTS[0], [], "a question is"),
        (PROMPTS[0], "What?", "no tokenizer"),
        (PROMPTS[0], [64], "outside this model's vocabulary"),
        (PROMPTS[0], [{"role": "user", "content": "What?"}], "a question is"),
    ],
)
def test_what_is_no_question(tiny, prompt, question, says):
    with pytest.raises(ValueError, match=says):
        kvjax.generate(tiny, prompt, question=question)
