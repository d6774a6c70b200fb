"""Samples for reinforcement learning: many per prompt, with weights that change, and nothing compiled again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.transformer import forward
from kvjax.runtime import rows
from kvjax.runtime.rollouts import Rollouts


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, 64, random.integers(5, 60)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def rollouts(tiny) -> Rollouts:
    return Rollouts(tiny, "rkv:40", rows=3, max_prompt_tokens=64, max_new_tokens=16, filters=["top_k"])


def test_samples_are_those_of_generate(rollouts, tiny):
    given = prompts(3)
    got = rollouts.generate(given, samples=2, max_new_tokens=9, temperature=1.5, top_k=20, seed=5)
    assert [len(samples) for samples in got] == [2, 2, 2]
    for i, samples in enumerate(got):
        for j, sample in enumerate(samples):
            options = {"max_new_tokens": 9, "temperature": 1.5, "top_k": 20, "seed": 5 + 2 * i + j}
            want = kvjax.generate(tiny, given[i], "rkv:40", **options)
            assert (sample.tokens, sample.stop_reason) == (want.tokens, want.stop_reason)
            np.testing.assert_allclose(sample.logprobs, want.logprobs, atol=2e-5)


def test_weights_are_exchanged_without_compiling(rollouts, tiny):
    given = prompts(2)
    before = rollouts.generate(given, temperature=0.0)
    programs = [program for program in vars(rows).values() if isinstance(program, rows.Program)]
    made = [len(program.executables) for program in programs]
    other = jax.tree.map(lambda x: x * 1.5, tiny)
    rollouts.update(other)
    after = rollouts.generate(given, temperature=0.0)
    rollouts.update(tiny)
    again = rollouts.generate(given, temperature=0.0)
    assert [len(program.executables) for program in programs] == made
    assert [s.tokens for (s,) in after] == [
        kvjax.generate(other, prompt, "rkv:40", max_new_tokens=16).tokens for prompt in given
    ]
    assert [s.tokens for (s,) in again] == [s.tokens for (s,) in before]


def test_log_probabilities_with_the_full_cache(rollouts, tiny):
    given, answers = prompts(2), [[1, 2, 3], [4]]
    got = rollouts.token_logprobs(given, answers)
    for prompt, answer, logprobs in zip(given, answers, got, strict=True):
        logits = np.asarray(forward(tiny, jnp.asarray([[*prompt, *answer]], jnp.int32))[0], np.float64)
        whole = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        want = [whole[len(prompt) - 1 + k, token] for k, token in enumerate(answer)]
        np.testing.assert_allclose(logprobs, want, atol=1e-5)


def test_log_probabilities_of_empty_answers(rollouts):
    given = prompts(1)[0]
    empty, one, padding = rollouts.token_logprobs([given, given, []], [[], [1, 2, 3], []])
    assert empty.tolist() == padding.tolist() == []
    np.testing.assert_array_equal(one, rollouts.token_logprobs([given], [[1, 2, 3]])[0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (([[1], []], [[1], [2]]), "prompt 2 of 2: 0 tokens are not 1 to"),
        (([[1], [64]], [[1], [2]]), "prompt 2 of 2: token id 64 is outside"),
        (([[1]], [[-1]]), "answer 1 of 1: token id -1 is outside"),
        (([[1], [2]], [[3]]), "1 answers are given; give 2"),
        (([[1]], [[3]], 0.0), "temperature=0.0; give a number above 0"),
    ],
)
def test_what_log_probabilities_refuse(rollouts, given, says):
    with pytest.raises(ValueError, match=says):
        rollouts.token_logprobs(*given)


def test_log_probabilities_after_temperature(tiny):
    """With `full`, samples' log-probabilities are those of the full cache, whichever temperature both are asked for."""
    given = prompts(2)
    sizes = {"rows": 3, "max_prompt_tokens": 64, "max_new_tokens": 16}
    plain, scaled = Rollouts(tiny, **sizes), Rollouts(tiny, scaled_logprobs=True, **sizes)
    for temperature in (0.5, 0.0):
        pairs = [each.generate(given, max_new_tokens=9, temperature=temperature) for each in (plain, scaled)]
        (before, after) = ([sample for (sample,) in samples] for samples in pairs)
        assert [sample.tokens for sample in before] == [sample.tokens for sample in after]
        for samples, divided in ((before, 1.0), (after, temperature or 1.0)):
            want = plain.token_logprobs(given, [sample.tokens for sample in samples], divided)
            for sample, logprobs in zip(samples, want, strict=True):
                np.testing.assert_allclose(sample.logprobs, logprobs, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_p": 0.5}, "have no such filter"),
        ({"max_new_tokens": 17}, "are for 16 or fewer"),
        ({"samples": 0}, "samples=0"),
        ({"prompts": [[1] * 65]}, "65"),
    ],
)
def test_what_is_refused(rollouts, options, says):
    with pytest.raises(ValueError, match=says):
        rollouts.generate(**{"prompts": prompts(1)} | options)


def test_unknown_filters(tiny):
    with pytest.raises(ValueError, match="unknown 'topk'"):
        Rollouts(tiny, rows=1, max_prompt_tokens=8, max_new_tokens=8, filters=["topk"])
