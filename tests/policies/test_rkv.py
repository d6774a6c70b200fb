"""R-KV against the literal algorithm."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import oracle_rkv as oracle
from policies.driver import make_case
from policies.test_recompress import equals

from kvjax.cache import PromptKV
from kvjax.config import RopeConfig
from kvjax.policies import RKV, PolicyError, rkv

# The cases worked out by hand.

KEYS = [[1, 0], [1, 0], [0, 1], [1, 0], [0, 1]]


def charged(keys, **options) -> np.ndarray:
    """What each key is charged, of one head."""
    keys = np.asarray(keys, np.float32)[None, None]
    return np.asarray(jax.jit(partial(rkv.redundancy, **options))(keys, np.ones(keys.shape[:3], bool)))[0, 0]


def test_the_oldest_duplicate_is_charged_most_and_the_newest_not():
    """The first of three equal keys is charged by two others, the second by one: of five, 0.4 and 0.2."""
    mean, shares = oracle.redundancy(np.asarray(KEYS, np.float64))
    np.testing.assert_allclose(mean, [0.4, 0.2, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(shares[:4], [0.2611, 0.2138, 0.1750, 0.1750], atol=5e-5)
    np.testing.assert_allclose(charged(KEYS), shares, rtol=1e-6)


def test_who_has_no_duplicate_spares_the_first():
    """As in the published code: the third key, here alone, has a cosine of 0.3 with the first."""
    keys = np.asarray([[1, 0], [1, 0], [0.3, np.sqrt(0.91)]])
    mean, _ = oracle.redundancy(keys)
    np.testing.assert_allclose(mean, [(1 * 0 + 0.3) / 3, 0.3 / 3, 0.6 / 3], atol=1e-12)
    spared, shares = oracle.redundancy(keys, spare_first=True)
    np.testing.assert_allclose(spared, [0, 0.3 / 3, 0.6 / 3], atol=1e-12)
    np.testing.assert_allclose(charged(keys, spare_first=True), shares, rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "expected", "best"),
    [
        (0.1, [-0.1850, -0.1724, -0.1375, -0.1475], {2, 3}),
        (0.5, [0.1194, -0.0069, 0.0125, -0.0375], {0, 2}),
        (0.0, [-0.2611, -0.2138, -0.1750, -0.1750], {2, 3}),
        (1, [0.5, 0.2, 0.2, 0.1], {0, 1}),
    ],
)
def test_attention_against_redundancy(weight, expected, best, monkeypatch):
    """With attention as given, and of five tokens the last kept anyway."""
    given = np.asarray([[[0.5, 0.2, 0.2, 0.1, 0.0]]], np.float32)
    monkeypatch.setattr(RKV, "attention", lambda *_: jnp.asarray(given))
    policy = RKV(budget=3, window=1, kernel=1, weight=weight)
    keys, length = np.asarray(KEYS, np.float32)[None, :, None], np.asarray([5], np.int32)
    still = RopeConfig(theta=100.0, dim=0).resolve(1)  # not rotated

    @jax.jit
    def chosen(keys, length, budget):
        scores = policy.scores(make_case(0, [1], 1, 1, 1, 2).spec, PromptKV.of(still, keys, keys, keys, length, length))
        return scores, policy.keep_mask(scores, length, budget)

    scores, mask = jax.device_get(chosen(keys, length, np.asarray([3], np.int32)))
    np.testing.assert_allclose(scores[0, 0, :4], expected, atol=5e-5)
    assert set(np.flatnonzero(mask[0, 0]).tolist()) == best | {4}


def test_the_group_takes_its_largest_logits():
    """Before the softmax: (2, 0, 0) and (0, 2, 0) are (2, 2, 0) together."""
    logits = np.asarray([[[2.0, 0, 0], [0, 2.0, 0]]])
    np.testing.assert_allclose(oracle.attention(logits), [0.4683, 0.4683, 0.0634], atol=5e-5)
    apart = [np.exp(x) / np.exp(x).sum() for x in logits[0]]
    np.testing.assert_allclose(np.mean(apart, axis=0), [0.4467, 0.4467, 0.1065], atol=5e-5)
    spec = make_case(0, [1], 1, 2, 1, 4).spec
    keys = 4 * np.eye(4, dtype=np.float32)[:, None]
    queries = np.zeros((4, 2, 4), np.float32)
    queries[3, 0, 0] = queries[3, 1, 1] = 1  # of the last token, 4 · 1 / √4
    still, policy = RopeConfig(theta=100.0, dim=0).resolve(1), RKV(window=1)

    @jax.jit
    def attention(q, k, length, scored):
        prompt = PromptKV.of(still, q, k, k, length, length)
        return policy.attention(spec, prompt, jnp.swapaxes(prompt.k_rotated, 1, 2), scored)

    got = np.asarray(
        attention(queries[None], keys[None], np.asarray([4], np.int32), np.asarray([[[True] * 3 + [False]]]))
    )
    np.testing.assert_allclose(got[0, 0], [0.4683, 0.4683, 0.0634, 0], atol=5e-5)


@pytest.mark.parametrize(
    ("sliding", "expected"), [(None, [1 / 3] * 3), (3, [0, 1 / 2, 1 / 2]), (2, [0, 0, 1]), (1, [0, 0, 0])]
)
def test_a_sliding_window_of_so_many_tokens_has_the_querys_own_in_it(sliding, expected):
    """The last of four tokens, which looks at all alike, gives nothing to what is as far from it as the window is long."""
    spec = dataclasses.replace(make_case(0, [1], 1, 1, 1, 4).spec, window=sliding)
    still, policy, keys = RopeConfig(theta=100.0, dim=0).resolve(1), RKV(window=1), np.zeros((1, 4, 1, 4), np.float32)

    @jax.jit
    def attention(keys, length, scored):
        prompt = PromptKV.of(still, keys, keys, keys, length, length)
        return policy.attention(spec, prompt, jnp.swapaxes(prompt.k_rotated, 1, 2), scored)

    got = attention(keys, np.asarray([4], np.int32), np.asarray([[[True] * 3 + [False]]]))
    np.testing.assert_allclose(got[0, 0], [*expected, 0], atol=1e-6)


def test_a_long_prompt_takes_no_room_for_all_pairs():
    """Of 8192 keys in two heads they would be 537 MB."""
    keys = jax.ShapeDtypeStruct((1, 2, 8192, 16), jnp.float32)
    compiled = jax.jit(rkv.redundancy).lower(keys, jax.ShapeDtypeStruct((1, 2, 8192), bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 200e6


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 16, "every": 5, "window": 4, "kernel": 3}, 4, 2),
    "mha, code's weight": ({"budget": 13, "every": 4, "window": 3, "weight": 0.07, "spare_first": True}, 2, 2),
    "mqa, each token": ({"budget": 14, "every": 1, "window": 5, "kernel": 5, "weight": 0.5}, 4, 1),
    "fraction": ({"budget": 0.4, "every": 6, "window": 2, "threshold": 0.2}, 4, 2),
    "attention alone": ({"budget": 12, "every": 7, "window": 4, "weight": 1.0}, 4, 2),
    "redundancy alone": ({"budget": 12, "every": 20, "window": 1, "weight": 0.0}, 2, 2),
}
FAST = "gqa"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """Ragged rows, prompts shorter and longer than the budget and a round: what is kept and put out at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    equals(RKV(**options), oracle.RKV, options, heads, kv_heads, rows=40, steps=16)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window=0 is too small. Give 1"),
        ({"kernel": 4}, "kernel=4 is even. Give an odd width"),
        ({"weight": 1.5}, "weight=1.5 is out of range. Give 0 to 1"),
        ({"every": 0}, "every=0 is too small. Give 1"),
        ({"budget": 7}, "7 slots, but the policy always keeps the last 8 tokens"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        RKV(**options)
