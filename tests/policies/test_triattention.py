"""TriAttention against the literal algorithm; and the statistics that it takes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from policies import oracle_triattention as oracle
from policies.driver import TINY, make_case, rotate, run
from policies.oracle_arrays import ROPE
from policies.surrogates import mean_queries
from policies.test_recompress import equals

from kvjax.config import Rope, RopeConfig
from kvjax.policies import MeanQueries, PolicyError, TriAttention
from kvjax.policies.families.trigonometry import frequencies, pairs
from kvjax.policies.profile import load, pack


def policy_of(statistics: Any, **options: Any) -> TriAttention:
    """A policy with these statistics [N, 3, F] in each of two layers."""
    found = np.stack([np.asarray(statistics, np.float32)] * 2)
    profile = MeanQueries.of(found, method="triattention", model="", data="", settings=())
    return TriAttention(profile=profile, **options)


def expected(policy: TriAttention, rope: Rope, key: Any, seen: int) -> float:
    """What the average query of one head makes of one rotated key."""
    key = np.asarray(key, np.float32)[None, None, None]
    spec = dataclasses.replace(make_case(0, [1], 1, 1, 1, key.shape[-1]).spec, rope=rope)
    found = jax.jit(lambda key, seen: policy.expected(spec, key, seen))(key, np.asarray([seen], np.int32))
    return np.asarray(found).item()


def turned_by(rope: Rope, x: Any, pos: int) -> np.ndarray:
    """A vector rotated by the library."""
    return np.asarray(jax.jit(rope.rotate)(np.asarray(x, np.float32), np.int32(pos)))


# The cases worked out by hand.


@pytest.mark.parametrize(("agg", "value"), [("mean", 0.4481), ("max", 1.2087)])
def test_scores_by_hand(agg, value):
    """ω = 0.5, a key at 3 of size 1, 10 tokens seen: cosines of 4, 4.5 and 5.5, and 1.5 - 1 for the spread."""
    np.testing.assert_allclose(np.cos([4, 4.5, 5.5]), [-0.6536, -0.2108, 0.7087], atol=5e-5)
    found = oracle.score(np.ones(1, complex), np.asarray([1.5]), np.ones(1, complex), np.asarray([0.5]), 3, 10, 3, agg)
    assert found == pytest.approx(value, abs=5e-5)
    policy = policy_of([[[1.0], [0.0], [1.5]]], offsets=3, agg=agg)
    key = [np.cos(0.5 * 3), np.sin(0.5 * 3)]
    assert expected(policy, Rope((0.5,)), key, 10) == pytest.approx(value, abs=5e-5)


def test_without_a_mean_the_time_does_not_matter():
    """Keys rank by ρ |k|."""
    policy, rope = policy_of([[[0.0, 0], [0, 0], [2, 3]]]), Rope((1.0, 0.01))
    for seen in (1, 1000):
        assert expected(policy, rope, [3, 0, 4, 1], seen) == pytest.approx(2 * 5 + 3 * 1)


def test_queries_that_are_all_alike_score_their_products():
    """ρ = |μ|: the products of the query, rotated to each position to come, with the key, averaged."""
    query, key = np.random.default_rng(0).normal(size=(2, 8))
    half = query[:4] + 1j * query[4:]
    policy = policy_of([[half.real, half.imag, np.abs(half)]], offsets=5)
    products = [rotate(ROPE, query, 20 + 2**i) @ rotate(ROPE, key, 7) for i in range(5)]
    assert expected(policy, ROPE, rotate(ROPE, key, 7), 20) == pytest.approx(np.mean(products), rel=1e-3)


def test_layouts_by_hand():
    """Channels i and i + half, or 2 i and 2 i + 1; the wrong ones of a key give a number that is nearly the right one."""
    size = [2**0.5] * 2
    policy, rope = policy_of([[[1.0, 1], [1, 1], size]], offsets=1), Rope((1.0, 0.01))
    turned = turned_by(rope, [1, 2, 3, 4], 7)
    assert expected(policy, rope, turned, 7) == pytest.approx(9.8639, abs=5e-3)  # of sizes in float16
    found = oracle.score(
        np.full(2, 1 + 1j), np.asarray(size), np.asarray([1 + 3j, 2 + 4j]), np.asarray([1, 0.01]), 7, 7, 1, "mean"
    )
    assert found == pytest.approx(9.8639, abs=1e-4)
    other = dataclasses.replace(rope, interleaved=True)
    assert expected(policy, other, turned, 7) == pytest.approx(9.9517, abs=5e-3)
    real, imaginary = jax.jit(lambda x: pairs(other, x))(np.asarray([1, 2, 3, 4], np.float32))
    assert (real.tolist(), imaginary.tolist()) == ([1, 3], [2, 4])


def test_channels_that_pass_through_are_pairs_that_do_not_turn():
    rope = Rope((0.5,), amplitude=2.0)
    real, imaginary = jax.jit(lambda x: pairs(rope, x))(np.arange(6, dtype=np.float32))
    assert (real.tolist(), imaginary.tolist()) == ([0, 2, 3], [1, 4, 5])
    omega, factor = frequencies(rope, 6)
    assert (omega.tolist(), factor.tolist()) == ([0.5, 0, 0], [2, 1, 1])


def test_a_factor_of_rotation_is_in_queries_and_keys():
    """YaRN's: scores are 4 times those without, of a rotation by 2; the cached key has it once."""
    policy, key = policy_of([[[1.0, 0.3], [0.5, -1], [2, 3]]]), np.asarray([1.0, 2, 3, 4])
    plain, scaled = Rope((1.0, 0.01)), Rope((1.0, 0.01), amplitude=2.0)
    one, four = (expected(policy, rope, turned_by(rope, key, 5), 9) for rope in (plain, scaled))
    assert four == pytest.approx(4 * one, rel=1e-5)


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 16, "every": 5, "window": 4}, 4, 2),
    "mean of the group": ({"budget": 13, "every": 4, "window": 0, "gqa": "mean"}, 4, 1),
    "mean of the group's statistics": (
        {"budget": 12, "every": 1, "window": 3, "gqa": "mean_stats", "offsets": 6},
        4,
        2,
    ),
    "mha, nearest offsets, max": ({"budget": 0.4, "every": 6, "window": 2, "agg": "max", "offsets": 4}, 2, 2),
}
FAST = "gqa"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """Ragged rows, prompts shorter and longer than the budget and a round: what is kept and put out at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    statistics = mean_queries(
        TINY.with_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=8, rope=RopeConfig(100.0, 8))
    ).layer(0, 8)
    policy = policy_of(statistics, **options)
    equals(policy, oracle.TriAttention, options | {"queries": statistics}, heads, kv_heads, rows=50, steps=12)


# Profiles.


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = mean_queries(TINY)
    made.save(tmp_path / "tri.json")
    assert load(tmp_path / "tri.json", MeanQueries) == made
    assert TriAttention(profile=str(tmp_path / "tri.json")).bind(TINY).profile == made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TriAttention().bind(TINY), "no profile of the heads"),
        (
            lambda: run(TriAttention(budget=8, window=4, every=4), make_case(0, [20], 1)),
            "not bound to a model",
        ),
        (lambda: TriAttention(profile=mean_queries(TINY)).bind(TINY.with_attention(num_heads=2)), "was made for"),
        (
            lambda: TriAttention(profile=dataclasses.replace(mean_queries(TINY), queries=(pack(b"000"),) * 2)).bind(
                TINY
            ),
            "Check whether the file was truncated",
        ),
        (lambda: TriAttention(offsets=0), "offsets=0 is too small. Give 1"),
        (lambda: TriAttention(budget=127), "127 slots, but 0 first and 128 last"),
        (lambda: TriAttention(gqa="first"), "gqa='first'"),
    ],
)
def test_what_does_not_go(make, says):
    with pytest.raises(PolicyError, match=says):
        make()
