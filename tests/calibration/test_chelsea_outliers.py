"""Outlier heads against a count by hand, and what Chelsea makes of a profile of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import layer_specs
from kvjax.calibration.chelsea import Edges, Settings, outlier_heads, outlier_scores
from kvjax.calibration.make_profile import profile
from kvjax.calibration.recording import record
from kvjax.policies import Chelsea, Full, PolicyError, offloaded
from kvjax.policies.profile import HeadProfile, fingerprint, load, rows
from kvjax.policies.transforms.by_head import ByHead

TOKENS = np.random.default_rng(0).integers(0, 64, size=200)


def share_by_hand(keys: np.ndarray, chunk: int, threshold: float) -> float:
    """Tokens at even places of a chunk with no similar one at an odd place, of those that have any at an odd place."""
    weak = edges = 0
    for start in range(0, len(keys), chunk):
        part = keys[start : start + chunk]
        for a in part[0::2]:
            similar = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in part[1::2]]
            edges += bool(similar)
            weak += bool(similar) and max(similar) < threshold
    return weak / edges


@dataclasses.dataclass(frozen=True)
class Keys:
    """Measures the rotated keys themselves."""

    def __call__(self, spec, q, k, v):
        return k


SAMPLES = TOKENS.reshape(2, -1)
SETTINGS = Settings(fraction=0.25, threshold=0.5, chunk=8, sinks=3)


def test_scores_are_shares_of_tokens_without_a_similar_one(tiny):
    scores = outlier_scores(tiny, SAMPLES, SETTINGS)
    seen = [record(tiny, sample[None], Keys()) for sample in SAMPLES]
    expected = [
        [np.mean([share_by_hand(np.asarray(s[layer])[0, 3:, head], 8, 0.5) for s in seen]) for head in range(2)]
        for layer in range(2)
    ]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert 0 < np.min(scores) < np.max(scores) < 1


def test_edges_of_hand_made_keys(tiny):
    """(1, 0) and (.8, .6) have a similarity of .8; alone in the last chunk, a token has no edge and does not count."""
    spec = layer_specs(tiny.config, 1, 5, 0, jnp.float32)[0]
    k = jnp.asarray([(1, 0), (0.8, 0.6), (1, 0), (0, 1), (1, 0)], jnp.float32)[None, :, None]
    share = [Edges(Settings(threshold=t, chunk=2, sinks=0))(spec, k, k, k).item() for t in (0.79, 0.81)]
    assert share == [0.5, 1.0]


def test_progress_and_short_samples(tiny):
    calls = []
    outlier_scores(tiny, SAMPLES, SETTINGS, progress=lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match="at least 5 tokens"):
        outlier_scores(tiny, SAMPLES[:, :4], SETTINGS)


def test_profile_is_what_the_policy_takes(tiny, tmp_path):
    made = profile(tiny, "chelsea", SAMPLES, "random tokens", SETTINGS)
    made.save(tmp_path / "heads.json")
    assert load(tmp_path / "heads.json") == made
    scores = outlier_scores(tiny, SAMPLES, SETTINGS)
    assert made.heads("outlier") == [np.unravel_index(np.argmax(scores), scores.shape)]
    from_file = Chelsea(budget=0.5, profile=str(tmp_path / "heads.json")).bind(tiny.config)
    assert from_file == Chelsea(budget=0.5, profile=made).bind(tiny.config)
    assert isinstance(from_file, ByHead)


@pytest.mark.parametrize(
    ("options", "says"), [({"fraction": 1.0}, "fraction=1.0"), ({"chunk": 1}, "chunk=1"), ({"sinks": -1}, "sinks=-1")]
)
def test_bad_settings(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


def test_the_highest_scores_are_outliers():
    scores = np.arange(50.0).reshape(25, 2)
    labels = outlier_heads(scores)
    assert [(i, j) for i in range(25) for j in range(2) if labels[i][j] == "outlier"] == [(24, 0), (24, 1)]
    assert outlier_heads(np.zeros((2, 2))) == (("outlier", "clustered"), ("clustered", "clustered"))


def test_first_layers_count_inside_the_fraction():
    """Llama-2, 32 layers of 32 heads: 4 % are 41, of which the first layer is 32; the other nine have the highest scores."""
    scores = np.random.default_rng(1).uniform(size=(32, 32))
    labels = outlier_heads(scores, first_layers=1)
    assert labels[0] == ("outlier",) * 32
    others = [(i, j) for i in range(1, 32) for j in range(32) if labels[i][j] == "outlier"]
    assert len(others) == 9
    assert {scores[place] for place in others} == set(np.sort(scores[1:].reshape(-1))[-9:])
    assert sum(row.count("outlier") for row in outlier_heads(scores, fraction=0.01, first_layers=2)) == 64


def profile_of(params, labels) -> HeadProfile:
    scores = rows([[0.0] * len(row) for row in labels])
    return HeadProfile("chelsea", fingerprint(params.config), "made up", (), scores, rows(labels))


def test_outlier_heads_keep_everything_and_the_others_pay(tiny):
    heads = profile_of(tiny, [["outlier", "clustered"], ["clustered", "clustered"]])
    policy = Chelsea(budget=0.5, sinks=2, recent=4, chunk=4, every=1, profile=heads).bind(tiny.config)
    assert isinstance(policy, ByHead)
    full, clustered = policy.groups
    assert full == Full()
    assert clustered.budget == pytest.approx((0.5 - 0.25) / 0.75)
    assert policy.heads == (((0,), ()), ((1,), (0, 1)))
    assert policy.bind(tiny.config) == policy
    states = jax.eval_shape(policy.layer(layer_specs(tiny.config, 1, 64, 64, jnp.float32)[0]).init)
    assert states[0].pos.shape[-1] == 128
    assert states[1].cache.pos.shape[-1] == 64  # a third of 128 and one, rounded up


def test_four_percent_take_a_fifth_to_a_sixth(tiny):
    """The paper's 4 % at R = .2 leave 16.7 % to each of the other heads."""
    config = tiny.config.with_depth(50)
    labels = [["outlier", "outlier"], ["outlier", "outlier"], *[["clustered", "clustered"]] * 48]
    heads = dataclasses.replace(profile_of(tiny, labels), model=fingerprint(config))
    assert Chelsea(profile=heads).bind(config).groups[1].budget == pytest.approx(0.16 / 0.96)


@pytest.mark.slow
def test_generation_with_outlier_heads(tiny):
    heads = profile_of(tiny, [["clustered", "outlier"], ["clustered", "clustered"]])
    policy = Chelsea(budget=0.5, sinks=2, recent=4, chunk=4, every=2, profile=heads)
    ample = Chelsea(budget=1.0, profile=heads)
    options = {"max_new_tokens": 8, "ignore_eos": True}
    prompts = [TOKENS[:50].tolist(), TOKENS[:7].tolist()]
    tight = kvjax.generate(tiny, prompts, policy=policy, **options)
    assert tight[0].stats.cache_bytes == policy.nbytes(tiny.config, 2, 50, 8, jnp.float32)
    got, want = (kvjax.generate(tiny, prompts, policy=p, **options) for p in (ample, "full"))
    assert [g.tokens for g in got] == [w.tokens for w in want]


@pytest.mark.slow
def test_outlier_heads_in_host_memory(tiny):
    """The same text; what the outlier heads hold is on the host, and only that."""
    heads = profile_of(tiny, [["clustered", "outlier"], ["clustered", "clustered"]])
    policy = Chelsea(budget=0.5, sinks=2, recent=4, chunk=4, every=2, profile=heads)
    far = dataclasses.replace(policy, offload_outliers=True)
    bound = far.bind(tiny.config)
    assert isinstance(bound, ByHead)
    assert bound.groups == (offloaded(Full()), policy.bind(tiny.config).groups[1])
    assert bound.bind(tiny.config) == bound
    options = {"max_new_tokens": 8, "ignore_eos": True}
    prompts = [TOKENS[:50].tolist(), TOKENS[:7].tolist()]
    got, want = (kvjax.generate(tiny, prompts, policy=p, **options) for p in (far, policy))
    assert [(g.tokens, g.logprobs) for g in got] == [(w.tokens, w.logprobs) for w in want]
    keys_and_values = 2 * 2 * 96 * 16 * 4  # two rows of one head with 96 slots
    assert got[0].stats.host_cache_bytes == keys_and_values == far.host_nbytes(tiny.config, 2, 50, 8, jnp.float32)
    assert got[0].stats.cache_bytes == want[0].stats.cache_bytes - keys_and_values


@pytest.mark.parametrize("options", [{"outliers": False}, {"budget": 64}])
def test_all_heads_are_clustered(tiny, options):
    """If asked for, or if the budget is a size that no head may outgrow."""
    policy = Chelsea(**options, profile=profile_of(tiny, [["outlier", "clustered"], ["clustered", "clustered"]]))
    assert policy.bind(tiny.config) is policy


def test_without_a_profile_all_heads_are_clustered(tiny):
    assert Chelsea().bind(tiny.config) == Chelsea()
    none = profile_of(tiny, [["clustered", "clustered"], ["clustered", "clustered"]])
    assert isinstance(Chelsea(profile=none).bind(tiny.config), Chelsea)


def test_a_budget_that_the_outlier_heads_use_up(tiny):
    heads = profile_of(tiny, [["outlier", "outlier"], ["clustered", "clustered"]])
    with pytest.raises(PolicyError, match=r"outlier heads, which keep everything, are 0\.500 of all"):
        Chelsea(budget=0.4, profile=heads).bind(tiny.config)
