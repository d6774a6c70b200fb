"""RazorAttention's echo and induction heads: scores against their definition, and in a model that has one of each by construction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import make_case, rotate, rotated
from policies.oracle_arrays import softmax

from kvjax.calibration.make_profile import make_profile
from kvjax.calibration.razorattention import Matches, Settings, match_scores, random_tokens, retrieval_heads
from kvjax.config import PRESETS, RopeConfig
from kvjax.models import ModelConfig, abstract, init
from kvjax.policies import DuoAttention, PolicyError


def matched(rope, q, k, period: int, ahead: int, window: int) -> float:
    """Mean attention of one head [T, H] to earlier copies of each query's token, or to what stands `ahead` of them."""
    keys = [rotate(rope, key, pos) for pos, key in enumerate(k)]
    shares = []
    for pos in range(period, len(q)):
        logits = np.stack(keys[: pos + 1]) @ rotate(rope, q[pos], pos) / np.sqrt(q.shape[1])
        logits[: max(pos + 1 - window, 0)] = -np.inf
        copies = [s for s in range(pos) if (pos - s) % period == 0]
        shares.append(sum(softmax(logits)[s + ahead] for s in copies))
    return float(np.mean(shares))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
def test_scores_are_their_definition(heads, kv_heads, window):
    """36 texts, of which a token comes three times."""
    case = make_case(5, [21] * 36, steps=0, heads=heads, kv_heads=kv_heads)
    spec = dataclasses.replace(case.spec, window=window)
    measure = jax.jit(lambda *x: Matches(7)(spec, *rotated(spec.rope, *x)))
    got = np.asarray(measure(case.q, case.k, case.v))
    for row, head in np.ndindex(36, heads):
        q, k = case.q[row, :, head], case.k[row, :, head * kv_heads // heads]
        want = [matched(spec.rope, q, k, 7, ahead, 21 if window is None else window) for ahead in (0, 1)]
        np.testing.assert_allclose(got[:, row, head], want, rtol=1e-4, atol=1e-7)


# A model whose heads are known: of 40 channels, 16 hold a token, 16 the one before it, and one is always 1.

CODE, BEFORE, ONE = slice(0, 16), slice(16, 32), 32
SLOW = [*range(8, 16), *range(24, 32)]
"""Channels of a head of 32 that rotation leaves about as they are."""


@pytest.fixture(scope="module")
def known():
    """Layer 0: head 0 copies the token before, head 1 is an echo head. Layer 1: head 0 is an induction head, head 1 does nothing."""
    config = ModelConfig.uniform("llama", 40, 40, 8, 2, 4, 2, 32, 256, RopeConfig(theta=1e8, dim=32))
    params, random = abstract(config, "float32"), np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    embed = np.zeros((40, 40), np.float32)
    embed[:, CODE] = random.choice([-0.25, 0.25], size=(40, 16))
    embed[:, ONE] = 1.0
    shapes = {"q": (4, 32, 40), "k": (2, 32, 40), "v": (2, 32, 40), "o": (40, 128)}
    first, second = ({name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(2))
    # Head 0 asks, wherever it is, for what a rotation by one position makes of the same key.
    turn = np.asarray([1e8 ** (-i / 16) for i in range(16)])
    first["q"][0, :16, ONE] = 5.0
    first["k"][0, :16, ONE], first["k"][0, 16:, ONE] = 5.0 * np.cos(turn), 5.0 * np.sin(turn)
    first["v"][0, :16, CODE] = np.eye(16)
    first["o"][BEFORE, :16] = np.eye(16)
    for weights, query, head, kv_head, source in ((first, CODE, 2, 1, CODE), (second, CODE, 0, 0, BEFORE)):
        weights["q"][head, SLOW, query] = 8 * np.eye(16)
        weights["k"][kv_head, SLOW, source] = 8 * np.eye(16)
    made = []
    for layer, weights in zip(params.layers, (first, second), strict=True):
        flat = {name: jnp.asarray(value.reshape(getattr(layer.attn, name).shape)) for name, value in weights.items()}
        norm = jnp.ones_like(layer.attn_norm)
        made.append(dataclasses.replace(layer, attn_norm=norm, attn=dataclasses.replace(layer.attn, **flat)))
    return dataclasses.replace(params, embed=jnp.asarray(embed), layers=tuple(made))


SETTINGS = Settings(repeats=3, induction=0.25, echo=0.25)


def test_heads_that_are_known(known):
    """An induction head gives all it has to what came next; an echo head half to the copy at first, then two thirds, for it sees itself."""
    calls = []
    samples, data = random_tokens(known, (), 2, 24)
    assert data == "2 samples of 24 random tokens, seed 0"
    assert all(len(set(sample.tolist())) == 24 for sample in samples)
    induction, echo = match_scores(known, samples, SETTINGS, lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]
    assert induction[1, 0] > 0.9
    assert echo[0, 1] == pytest.approx((1 / 2 + 2 / 3) / 2, abs=0.02)
    assert np.sort(induction.reshape(-1))[-2] < 0.1
    assert np.sort(echo.reshape(-1))[-2] < 0.1
    labels = retrieval_heads(induction, echo, SETTINGS)[1]
    assert labels == (("streaming", "retrieval"), ("retrieval", "streaming"))


def test_profile_is_what_duoattention_takes(known, tmp_path):
    made = make_profile(known, "razorattention", settings=SETTINGS, length=24)
    assert (made.method, made.data) == ("razorattention", "1 samples of 24 random tokens, seed 0")
    made.save(tmp_path / "heads.json")
    bound = DuoAttention(profile=str(tmp_path / "heads.json")).bind(known.config)
    assert (
        bound == DuoAttention(profile=made).bind(known.config) == DuoAttention(profile=made.labels).bind(known.config)
    )
    assert bound.heads[-1] == ((0,), (1,))
    least = DuoAttention(profile=made, sparsity=1.0).bind(known.config)
    assert sum(len(heads) for heads in least.heads[0]) == 1
    assert least.heads[0] in (((1,), ()), ((), (0,)))


@pytest.mark.parametrize("share", [0.01, 0.14, 0.3, 1.0])
def test_the_best_of_either_score_retrieve(share):
    """Random scores of models of all sizes, with ties."""
    random = np.random.default_rng(3)
    for _ in range(60):
        shape = tuple(random.integers(1, 9, size=2))
        induction, echo = random.integers(1, 12, size=(2, *shape)) / 16
        scores, labels = retrieval_heads(induction, echo, Settings(induction=share, echo=share / 2))
        want = set()
        for found, part in ((induction, share), (echo, share / 2)):
            ranked = sorted(np.ndindex(*shape), key=lambda head, found=found: (-found[head], head))
            want |= set(ranked[: max(1, round(part * found.size))])
        got = {head for head in np.ndindex(*shape) if labels[head[0]][head[1]] == "retrieval"}
        assert got == want
        assert min(scores[head] for head in got) >= 1
        assert all(scores[head] <= 1 for head in set(np.ndindex(*shape)) - got)


def test_the_default_model_has_its_heads():
    """Of 90 KV heads 13 for induction and another one for echo."""
    config = PRESETS["smollm2-135m"]
    streaming = DuoAttention(profile="razorattention").bind(config).heads[-1]
    assert 90 - sum(map(len, streaming)) == 14
    assert DuoAttention(profile="razorattention", sparsity=0.5).bind(config) != DuoAttention().bind(config)
    with pytest.raises(PolicyError, match="kvjax calibrate razorattention"):
        DuoAttention(profile="razorattention").bind(dataclasses.replace(config, hidden_size=50))


def test_a_vocabulary_smaller_than_a_sample(known):
    samples, _ = random_tokens(known, (), 3, 90)
    assert samples.shape == (3, 90)
    assert samples.min() >= 0
    assert samples.max() < 40


def test_what_cannot_be_read(known, tmp_path):
    with pytest.raises(ValueError, match="omit it"):
        make_profile(known, "razorattention", [tmp_path])
    with pytest.raises(ValueError, match="1 samples of 1 random tokens"):
        make_profile(known, "razorattention", length=1)


@pytest.mark.parametrize(("options", "says"), [({"repeats": 1}, "repeats=1"), ({"echo": 0.0}, "echo=0.0")])
def test_bad_settings(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


def test_models_with_attention_sinks_are_refused(tiny):
    sinks = init(tiny.config.with_attention(sinks=True), jax.random.key(0))
    with pytest.raises(ValueError, match="attention sinks, such as llama"):
        match_scores(sinks, np.zeros((1, 4), np.int32))
