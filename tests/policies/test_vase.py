"""VaSE against the literal algorithm."""

import jax
import numpy as np
import pytest
from policies import oracle_vase as oracle
from policies.driver import make_case
from policies.slots import after_prompt, kept
from policies.test_recompress import equals

from kvjax.policies import PolicyError, VaSE
from kvjax.policies.families.noise import uniform_in_rounds

CONFIGURATIONS = {
    "gqa": ({"budget": 18, "every": 5, "sinks": 2}, 4, 2),
    "dkv": ({"budget": 16, "every": 4, "sinks": 2, "variant": "dkv", "sketch": 3}, 4, 2),
    "mha, no sinks, all values": ({"budget": 14, "every": 3, "sinks": 0, "share": 1.0, "seed": 5}, 2, 2),
    "mqa, all sampled": ({"budget": 20, "every": 7, "sinks": 1, "share": 0.0, "kernel": 1}, 4, 1),
    "fraction, dkv": ({"budget": 0.4, "every": 1, "sinks": 1, "variant": "dkv", "seed": 2}, 2, 2),
}
FAST = {"gqa"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """Ragged rows, prompts shorter and longer than the budget and a round: what is kept and put out at every step."""
    options, heads, kv_heads = CONFIGURATIONS[name]
    equals(VaSE(**options), oracle.VaSE, options, heads, kv_heads, rows=40, steps=16)


def test_large_values_are_protected():
    """Whatever is sampled, and whatever attention says: of 6 protected tokens 2 are sinks, and 3 have values of 100 times the size."""
    case = make_case(1, [60] * 8, steps=1)
    case.v[:, 20:23] *= 100
    policy = VaSE(budget=24, every=4, sinks=2, share=0.25)
    held = kept(policy, case, after_prompt(policy, case))
    assert all({0, 1, 20, 21, 22, 56, 57, 58, 59} <= head for row in held for head in row)
    assert len({tuple(sorted(head)) for row in held for head in row}) == 16


def test_samples_follow_attention():
    """A sample of one: how often a token is drawn is its weight. A sample of all has each token once."""
    weights, random = np.asarray([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(0)
    first = np.asarray([oracle.sample(weights, random.uniform(size=4), 1)[0] for _ in range(4000)])
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 4000, weights, atol=4 * np.sqrt(0.25 / 4000))
    assert sorted(oracle.sample(weights, random.uniform(size=4), 9)) == [0, 1, 2, 3]


def test_rounds_rows_and_heads_draw_numbers_of_their_own():
    spec = make_case(0, [1], 1).spec
    pos = np.broadcast_to(np.arange(20, dtype=np.int32), (3, 1, 20))
    draw = jax.jit(lambda pos, rounds: uniform_in_rounds(spec, 0, pos, rounds))
    found = np.asarray(draw(pos, np.asarray([7, 8, 7], np.int32)))
    np.testing.assert_array_equal(found[0], found[2])
    assert len({tuple(head) for row in found[:2] for head in row}) == 4
    np.testing.assert_allclose(found[1, 1], oracle.uniforms(0, 0, 8, 1)[:20], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every=0 is too small. Give 1"),
        ({"kernel": 4}, "kernel=4 is even. Give an odd width"),
        ({"share": 1.5}, "share=1.5 is out of range. Give 0 to 1"),
        ({"variant": "kv"}, "'attnv', 'dkv'"),
        ({"budget": 67}, "67 slots, but the policy always keeps the first 4 tokens and the last 64 tokens"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        VaSE(**options)
