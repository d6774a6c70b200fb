"""Continuations of contexts, against the plain model and token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import LongRope, RopeConfig
from kvjax.evals.following import following
from kvjax.models import transformer

RNG = np.random.default_rng(21)
PAIRS = [
    (RNG.integers(0, 64, n).tolist(), RNG.integers(0, 64, m).tolist())
    for n, m in ((50, 3), (1, 5), (61, 1), (40, 9), (1, 2))
]


FORWARD = jax.jit(transformer.forward)


def plain(params, context, continuation):
    """Padded on the right, which no token before sees, so that one program serves all lengths."""
    tokens = np.zeros((1, 72), np.int32)
    tokens[0, : len(context) + len(continuation)] = context + continuation
    logits = np.asarray(FORWARD(params, jnp.asarray(tokens)))[0].astype(np.float64)
    rows = logits[len(context) - 1 : len(context) + len(continuation) - 1]
    logprobs = rows - np.log(np.sum(np.exp(rows), axis=-1, keepdims=True))
    return logprobs[np.arange(len(rows)), continuation].sum(), (rows.argmax(axis=-1) == continuation).all()


def test_with_the_full_cache_it_is_the_plain_model(tiny):
    greedy = kvjax.generate(tiny, PAIRS[0][0], max_new_tokens=4, ignore_eos=True).tokens
    pairs = [*PAIRS, (PAIRS[0][0], greedy)]
    seen = []
    found = following(tiny, kvjax.Full(), pairs, batch=2, progress=lambda *done: seen.append(done))
    for pair, result in zip(pairs, found, strict=True):
        logprob, is_greedy = plain(tiny, *pair)
        assert result.logprob == pytest.approx(logprob, abs=2e-4)
        assert result.greedy == is_greedy
    assert found[-1].greedy
    assert seen[-1] == (6, 6)


def test_longrope_depends_on_the_tokens_of_a_pair_alone(tiny):
    """Neither on padding nor on the other pairs, which may lie beyond the original window of 61 tokens."""
    scaling = LongRope((1.0,) * 8, tuple(4.0 + i for i in range(8)), original_max_position=61, factor=8.0)
    params = tiny.replace(config=tiny.config.with_attention(rope=RopeConfig(1e4, 16, scaling=scaling)))
    pairs = [(PAIRS[2][0][:57], [5, 9, 2]), (PAIRS[2][0], [7, 1])]
    for (context, continuation), result in zip(pairs, following(params, kvjax.Full(), pairs, batch=4), strict=True):
        tokens = [*context, *continuation]
        logprobs = jax.nn.log_softmax(FORWARD(params, jnp.asarray([tokens]))[0])[len(context) - 1 : -1]
        expected = float(logprobs[jnp.arange(len(continuation)), jnp.asarray(continuation)].sum())
        assert result.logprob == pytest.approx(expected, abs=2e-4)


def test_continuations_are_read_through_the_compressed_context(tiny):
    """Each as alone; and not as with the full cache."""
    policy = kvjax.ChunkKV(budget=0.3, chunk=4, window=4)
    pairs = [PAIRS[0], PAIRS[2], PAIRS[3]]
    together = following(tiny, policy, pairs, batch=3)
    for pair, result in zip(pairs, together, strict=True):
        assert following(tiny, policy, [pair])[0].logprob == pytest.approx(result.logprob, abs=2e-5)
    assert abs(together[0].logprob - plain(tiny, *PAIRS[0])[0]) > 1e-3


def test_nothing_follows(tiny):
    with pytest.raises(ValueError, match="the continuation of pair 1 is empty"):
        following(tiny, kvjax.Full(), [([1], [2]), ([1], [])])
