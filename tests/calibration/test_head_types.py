"""CateKV's head types against the paper's equations, from the score of one head to the vote over samples."""

import dataclasses
import math
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import default_model
from policies.driver import make_case, rotated
from policies.oracle_catekv import adaptive_heads, code_score, frequencies, observation_matrix, variation

from kvjax.calibration import catekv
from kvjax.calibration.catekv import Scores, Settings, adaptive_by_sample, head_scores, vote
from kvjax.calibration.chelsea import outlier_heads
from kvjax.calibration.make_profile import METHODS, profile
from kvjax.calibration.recording import cut, record
from kvjax.policies import CateKV
from kvjax.policies.profile import fingerprint, shipped


@pytest.mark.parametrize(
    ("counts", "score"),
    [((2, 0, 0, 0), math.sqrt(3)), ((1, 1, 0, 0), 1.0), ((1, 1, 1, 1), 0.0), ((5, 5, 5, 0), 3**-0.5)],
)
def test_variation_of_hand_made_counts(counts, score):
    assert variation(counts) == pytest.approx(score)
    assert catekv.variation(jnp.asarray(counts), Settings()).item() == pytest.approx(score)


def test_variation_of_the_code_is_of_the_sample():
    assert catekv.variation(jnp.asarray([2, 0, 0, 0]), Settings(rule="code")).item() == pytest.approx(2.0)
    assert catekv.variation(jnp.asarray([0, 0, 0, 0]), Settings(rule="code")).item() == 0.0


@pytest.mark.parametrize("always", [1, 3, 10, 29])
def test_columns_that_are_always_critical(always):
    """If every observer looks at the same m of n tokens, the score is √((n - m) / m)."""
    observed = np.zeros((6, 30), np.float32)
    observed[:, :always] = 1 / always
    settings = Settings(quantile=1.0)
    score = catekv.variation(catekv.frequencies(jnp.asarray(observed), settings), settings)
    assert score.item() == pytest.approx(math.sqrt((30 - always) / always), rel=1e-5)


@pytest.mark.parametrize(("quantile", "alpha"), [(0.99, 1.0), (0.9, 0.8), (0.5, 1.0), (0.984, 0.8)])
@pytest.mark.parametrize("rule", ["paper", "code"])
def test_scores_of_random_matrices(rule, quantile, alpha):
    """64 heads at a time: one observation matrix each, peaked as attention is."""
    random = np.random.default_rng(5)
    logits = 3 * random.normal(size=(64, 8, 40)) + 4 * random.normal(size=(64, 1, 40))
    observed = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1))
    settings = Settings(quantile=quantile, alpha=alpha, rule=rule, chunk=4)
    got = catekv.variation(catekv.frequencies(jnp.asarray(observed), settings), settings)
    if rule == "code":
        want = [code_score(matrix, quantile, alpha, 4) for matrix in observed]
    else:
        want = [variation(frequencies(matrix, quantile, alpha)) for matrix in observed]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("rule", ["paper", "code"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
def test_a_layers_scores_from_queries_and_keys(rule, heads, kv_heads):
    case = make_case(4, [61] * 4, steps=0, heads=heads, kv_heads=kv_heads)
    settings = Settings(quantile=0.9, window=7, sinks=3, recent=5, chunk=4, rule=rule)
    measure = jax.jit(lambda *x: Scores(settings)(case.spec, *rotated(case.spec.rope, *x)))
    got = np.asarray(measure(case.q, case.k, case.v))
    group = heads // kv_heads
    for row, head in np.ndindex(4, kv_heads):
        queries, keys = case.q[row, :, head * group : (head + 1) * group], case.k[row, :, head]
        if rule == "code":  # only whole chunks of the 53 tokens between
            want = code_score(observation_matrix(queries, keys, 3, 6, 7), 0.9, 1.0, 4)
        else:
            want = variation(frequencies(observation_matrix(queries, keys, 3, 5, 7), 0.9, 1.0))
        assert got[row, head] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.4, 0.55, 1.0])
def test_the_vote(ratio):
    """200 random sets of samples, with scores that are often equal."""
    random = np.random.default_rng(2)
    for _ in range(40):
        shape = int(random.integers(1, 6)), int(random.integers(1, 5)), int(random.integers(1, 4))
        scores = random.integers(0, 6, size=shape).astype(float)
        labels = np.asarray(vote(adaptive_by_sample(scores, ratio), ratio))
        assert set(zip(*np.nonzero(labels == "adaptive"), strict=True)) == adaptive_heads(list(scores), ratio)
        assert (labels == "adaptive").sum() == math.ceil(round(ratio * labels.size, 6))


def test_the_released_masks_count():
    """⌈.3 · 32 · 8⌉ = 77 of the 256 heads of Llama-3-8B."""
    scores = np.random.default_rng(0).normal(size=(3, 32, 8))
    labels = np.asarray(vote(adaptive_by_sample(scores, 0.3), 0.3))
    assert (labels == "adaptive").sum() == 77


SETTINGS = Settings(window=6, sinks=2, recent=4, quantile=0.9, ratio=0.25)
SAMPLES = np.random.default_rng(0).integers(0, 64, size=(2, 50)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Raw:
    """Measures the rotated queries and keys themselves."""

    def __call__(self, spec, q, k, v):
        return q, k


def test_scores_of_a_model(tiny):
    calls = []
    scores = head_scores(tiny, SAMPLES, SETTINGS, lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]
    assert scores.shape == (2, 2, 2)
    for sample, tokens in enumerate(SAMPLES):
        for layer, (q, k) in enumerate(record(tiny, tokens[None], Raw())):
            for head in range(2):
                logits = np.einsum("qgh,kh->gqk", q[0, -6:, 2 * head : 2 * head + 2], k[0, 2:-4, head]) / 4
                logits[:, np.arange(44, 50)[:, None] < np.arange(2, 46)] = -np.inf
                attention = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
                want = variation(frequencies(attention.mean(axis=0), 0.9, 1.0))
                assert scores[sample, layer, head] == pytest.approx(want, rel=1e-4)


def test_the_profile_of_a_model(tiny):
    made = profile(tiny, "catekv", SAMPLES, "random tokens", SETTINGS)
    scores = head_scores(tiny, SAMPLES, SETTINGS)
    np.testing.assert_allclose(made.scores, scores.mean(axis=0), atol=5e-5)
    assert made.heads("adaptive") == sorted(adaptive_heads(list(scores), 0.25))
    assert len(made.heads("consistent")) == 3
    assert (made.method, made.model, made.data) == ("catekv", fingerprint(tiny.config), "random tokens")
    assert dict(made.settings) == dataclasses.asdict(SETTINGS)
    assert CateKV(profile=made).bind(tiny.config) == CateKV(profile=made.labels).bind(tiny.config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ratio": 1.2}, "ratio=1.2"),
        ({"quantile": -1}, "quantile=-1"),
        ({"window": 0}, "window=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"rule": "mine"}, "'paper', 'code'"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


@pytest.mark.parametrize("rule", ["paper", "code"])
def test_samples_that_are_too_short(tiny, rule):
    with pytest.raises(ValueError, match="leave 1 between 64 sinks and 256 recent ones"):
        Settings(rule=rule).middle(321)
    assert Settings(rule=rule).middle(345) == (25 if rule == "paper" else 24)


class Bytes:
    """A tokenizer of one token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
def reader(tiny):
    return dataclasses.replace(tiny, tokenizer=Bytes())


def test_samples_are_spread_over_the_files(reader, tmp_path):
    files = [tmp_path / "one" / "text.txt", tmp_path / "two" / "text.txt"]
    for file in files:
        file.parent.mkdir()
    files[0].write_text("abcdefghij")
    files[1].write_text("0123456789ABCDEF")
    pieces, data = cut(reader, files, 5, 3)
    assert [bytes(piece.tolist()).decode() for piece in pieces] == ["abc", "fgh", "012", "567", "ABC"]
    assert data == "5 samples of 3 tokens, spread evenly over one/text.txt, two/text.txt"


def test_samples_that_cannot_be_cut(reader, tiny, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("abcdefghij")
    with pytest.raises(ValueError, match="10 tokens, but 4 samples of 3 need 12"):
        cut(reader, [file], 4, 3)
    with pytest.raises(ValueError, match="0 files"):
        cut(reader, [], 4, 3)
    with pytest.raises(ValueError, match="no tokenizer"):
        cut(tiny, [file], 1, 3)


@pytest.mark.parametrize(
    ("method", "label", "count"),
    [("catekv", "adaptive", 36), ("chelsea", "outlier", 4), ("razorattention", "retrieval", 14)],
)
def test_the_default_model_has_its_profiles(method, label, count, tmp_path):
    """36 of its 90 KV heads are adaptive (40 %), 4 are outliers (4 %), 14 retrieve (14 % and 1 %).

    The files are such as `kvjax calibrate` writes.
    """
    found = shipped(method, default_model().config)
    assert found is not None
    assert len(found.heads(label)) == count
    assert [len(layer) for layer in found.labels] == [3] * 30
    settings = METHODS[method].settings(**dict(found.settings))
    assert tuple(dataclasses.asdict(settings).items()) == found.settings
    if method == "chelsea":
        assert outlier_heads(np.asarray(found.scores), settings.fraction, settings.first_layers) == found.labels
    found.save(tmp_path / "profile.json")
    file = resources.files("kvjax.policies") / "profiles" / f"{method}-{found.model}.json"
    assert (tmp_path / "profile.json").read_text() == file.read_text()
