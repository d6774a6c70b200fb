"""Compactor against the literal algorithm."""

import jax
import numpy as np
import pytest
from policies import oracle_compactor as oracle
from policies.driver import make_case, run
from policies.oracle_arrays import ROPE, rotate
from policies.slots import kept

from kvjax.cache import PromptKV
from kvjax.policies import Compactor, PolicyError
from kvjax.policies.budget import budget_tokens
from kvjax.policies.compactor import leverage

# The cases worked out by hand.

CROSS = [[1, 0], [-1, 0], [1, 0], [-1, 0], [0, 3], [0, -3]]


def standing(keys, inside=None, ridge=0.0) -> np.ndarray:
    """Leverage of one head's keys."""
    keys = np.asarray(keys, np.float32)[None, None]
    inside = np.ones((1, keys.shape[2]), bool) if inside is None else np.asarray(inside)[None]
    return np.asarray(leverage_of(keys, inside, ridge))[0, 0]


leverage_of = jax.jit(lambda keys, inside, ridge: leverage(keys, inside, None, ridge), static_argnums=2)


@pytest.mark.parametrize("size", [1, 0.01, 100])
def test_leverage_by_hand(size):
    """Four keys share an axis, two the other one; how long they are does not matter without a ridge."""
    expected = [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    np.testing.assert_allclose(oracle.leverage(size * np.asarray(CROSS, np.float64), None, 0.0), expected)
    np.testing.assert_allclose(standing(size * np.asarray(CROSS)), expected, rtol=1e-5)


def test_padding_and_ends_have_no_leverage():
    keys = [[7, 7], *CROSS, [np.nan, np.nan]]
    got = standing(keys, [False] + [True] * 6 + [False])
    np.testing.assert_allclose(got, [0, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0], rtol=1e-5)


def test_keys_that_are_all_alike_have_none():
    """Their matrix is 0, to which a ridge of 0.01 is added if it came without one."""
    for ridge in (0.0, 0.01):
        np.testing.assert_allclose(standing(np.ones((6, 2)), ridge=ridge), 0, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, 4, 64])
def test_queries_that_look_everywhere_give_each_token_as_much(chunk):
    """One each, in the last chunk, which is not full, too: neither padding nor the ends take or give any."""
    policy, case = Compactor(sinks=1, recent=1, chunk=chunk), make_case(0, [9, 6], 1)
    lengths = np.asarray([9, 6], np.int32)
    place = np.arange(10)
    inside = (place >= 1) & (place < np.asarray([[8], [5]]))

    @jax.jit
    def attention(q, k, v, lengths, inside):
        return policy.attention(case.spec, PromptKV.of(ROPE, q, k, v, lengths, lengths), inside)

    got = attention(*(x[:, :10] for x in (0 * case.q, case.k, case.v)), lengths, inside)
    np.testing.assert_allclose(got, np.broadcast_to(inside[:, None], got.shape), rtol=1e-6)


def test_later_tokens_attend_to_earlier_ones_and_the_other_way_round():
    """Two tokens, of which only the first asks, for the second: with a logit of ln 3 it gives it three quarters."""
    queries, keys = np.asarray([[[np.log(3)]], [[0.0]]]), np.asarray([[0.0], [1.0]])
    np.testing.assert_allclose(oracle.attention(queries, keys, 2, 1.0), [0.25 + 0.5, 0.75 + 0.5])
    np.testing.assert_allclose(oracle.attention(queries, keys, 1, 1.0), [1, 1])


def test_the_sketch_is_of_a_layer_and_a_seed():
    spec = make_case(0, [1], 1).spec
    one, other = (np.asarray(Compactor(seed=seed, sketch=400).sketch_of(spec)) for seed in (0, 1))
    assert one.shape == (2, 8, 400)
    assert np.var(one) == pytest.approx(1 / 400, rel=0.1)
    assert abs(np.corrcoef(one[0].ravel(), one[1].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.1


# Random cases against the oracle.

CONFIGURATIONS = {
    "gqa": ({"budget": 24, "sinks": 2, "recent": 3, "chunk": 7, "sketch": 5}, 4, 2),
    "mha, no sketch, all scaled": (
        {"budget": 20, "sinks": 0, "recent": 1, "chunk": 16, "sketch": None, "scaled": True, "per_head": True},
        2,
        2,
    ),
    "mqa, no ends": ({"budget": 15, "sinks": 0, "recent": 0, "chunk": 10, "sketch": 3, "ridge": 1.0}, 4, 1),
    "fraction, leverage counts much": ({"budget": 0.4, "sinks": 3, "recent": 4, "sketch": 8, "blend": 3.0}, 4, 2),
    "attention alone": ({"budget": 16, "sinks": 4, "recent": 2, "chunk": 5, "blend": 0.0}, 2, 2),
}
STEPS = 3
FAST = "gqa"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget: kept tokens, and those that come after them."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    policy = Compactor(**options)
    least = 15 if isinstance(policy.budget, float) else 1  # its share of fewer tokens is less than both ends
    lengths = np.random.default_rng(len(name)).integers(least, 64, size=50)
    case = make_case(6, lengths, STEPS, heads, kv_heads)
    held = [kept(policy, case, state) for state in run(policy, case, padding=np.nan)[2]]
    sketch = policy.sketch_of(case.spec)
    sketch = None if sketch is None else np.asarray(sketch, np.float64)
    told = {name: value for name, value in options.items() if name not in ("budget", "sketch")}
    for row, length in enumerate(lengths.tolist()):
        queries, keys = (rotate(ROPE, x[row, :length], np.arange(length)[:, None]) for x in (case.q, case.k))
        budget = budget_tokens(policy.budget, length + STEPS)
        own = (x[row, :length].astype(np.float64) for x in (case.k, case.v))
        expected = oracle.survivors(queries, keys, *own, budget, sketch, **told)
        for i, heads_kept in enumerate(held):
            assert heads_kept[row] == [{*head, *range(length, length + i)} for head in expected]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk": 0}, "chunk=0 is too small. Give 1"),
        ({"sketch": 0}, "sketch=0 is too small. Give 1"),
        ({"ridge": -0.1}, "ridge=-0.1 is too small. Give 0"),
        ({"budget": 0.01, "sinks": 0, "recent": 0}, "gives 0 slots, but the policy needs at least one. Raise budget"),
        ({"budget": 11}, "11 slots, but the policy always keeps the first 8 tokens and the last 4 tokens"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        Compactor(**options).validate(60)
