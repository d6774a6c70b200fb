"""The most likely tokens of each step, against a sort in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kvjax.models import Params
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.top_tokens import MOST, top_tokens


@pytest.mark.parametrize("size", [MOST, 64, 129, 5000])
def test_against_a_sort(size: int) -> None:
    """With many ties, minus infinity among the logits, and all of them equal."""
    random = np.random.default_rng(size)
    logits = random.normal(size=(6, size)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2] = 0.0
    logits[3, random.permutation(size)[: size - 3]] = -np.inf
    logits[4] = np.sort(logits[4])
    found = jax.jit(top_tokens)
    exact = logits.astype(np.float64)
    wanted = exact - np.log(np.sum(np.exp(exact), axis=1, keepdims=True))
    for count in (0, 1, 5, MOST):
        ids, logprobs = (np.asarray(x)[:, :count] for x in found(logits, jnp.asarray(count, jnp.int32)))
        order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, order, axis=1), rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_report_as_many_as_they_ask_for(tiny: Params) -> None:
    """Against logits without a cache. Tokens and log-probabilities of all rows are those of a batch in which no row asks."""
    batch = Batch(tiny, "streaming_llm:60", rows=3, prompt_len=40, max_new_tokens=6, tops=True)
    random = np.random.default_rng(0)
    prompts, tops = [random.integers(0, 64, size).tolist() for size in (9, 30, 17)], (0, 3, MOST)

    def run(tops: tuple[int, ...]) -> tuple[list[list[int]], list[list[float]], list[list[tuple[int, float]]]]:
        tokens, logprobs, found = [], [], []
        batch.reset()
        firsts = [
            batch.admit([job], [row])
            for row, job in enumerate(Job(prompt, 6, tops=top) for prompt, top in zip(prompts, tops, strict=True))
        ]
        call = batch.serve(8)
        for row, first in enumerate(firsts):
            tokens.append([*np.asarray(first.token).tolist(), *np.asarray(call.tokens)[row, :5].tolist()])
            logprobs.append([*np.asarray(first.logprob).tolist(), *np.asarray(call.logprobs)[row, :5].tolist()])
            ids, values = (
                np.concatenate([np.asarray(a), np.asarray(b)[row, :5]])
                for a, b in zip(first.tops, call.tops, strict=True)
            )
            found.append([ids[:, : tops[row]], values[:, : tops[row]]])
        return tokens, logprobs, found

    tokens, logprobs, found = run(tops)
    plain = run((0, 0, 0))
    assert (tokens, logprobs) == plain[:2]
    for row, top in enumerate(tops):
        logits = np.asarray(oracles.logits(tiny, [[*prompts[row], *tokens[row]]]))[0, len(prompts[row]) - 1 : -1]
        ids, values = found[row]
        order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
        np.testing.assert_array_equal(ids, order)
        if top:
            np.testing.assert_array_equal(values[:, 0], logprobs[row])  # the tokens are greedy
            expected = jax.nn.log_softmax(logits, axis=-1)
            np.testing.assert_allclose(values, np.take_along_axis(expected, order, axis=1), atol=1e-4)


def test_jobs_that_ask_for_too_many_are_refused(tiny: Params) -> None:
    sizes = {"rows": 1, "prompt_len": 8, "max_new_tokens": 4}
    for batch, most in ((Batch(tiny, tops=True, **sizes), MOST), (Batch(tiny, **sizes), 0)):
        with pytest.raises(ValueError, match=f"most likely tokens are {most + 1}, but this batch is for 0 to {most}"):
            batch.check(Job([1], 2, tops=most + 1))
