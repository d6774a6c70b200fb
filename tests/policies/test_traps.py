"""What other implementations of these methods get wrong, over all policies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, Case, make_case, rotate, run
from policies.oracle_arrays import ROPE, softmax
from policies.surrogates import model_inputs

import kvjax
from kvjax.cache import layer_specs
from kvjax.policies import (
    H2O,
    AdaKV,
    CaM,
    ClusterKV,
    Full,
    InfiniGen,
    KNorm,
    PolicyError,
    PyramidKV,
    Quest,
    ShadowKV,
    SnapKV,
    TreeKV,
    get_policy,
    policies,
    pyramid,
)

by_name = pytest.mark.parametrize
LENGTHS = [50, 3, 16, 17]


@by_name("name", [name for name, cls in policies().items() if "budget" in {f.name for f in dataclasses.fields(cls)}])
def test_a_share_that_rounds_to_nothing_is_an_error(name, tiny):
    """Of a long prompt; a short one in the same batch is none."""
    policy = get_policy(name, budget=0.0005, **model_inputs(policies()[name], tiny.config))
    with pytest.raises(PolicyError, match=r"^prompt 1 of 2: .*budget of 0.0005 gives 0 (slots|tokens)"):
        kvjax.generate(tiny, [[1, 2, 3] * 500, [1, 2, 3]], policy=policy, max_new_tokens=4)


def test_pyramid_has_layers_of_its_own_at_4k(tiny):
    """At half of a prompt of 4096 tokens, with all at its defaults, layers differ, in slots and in what they hold."""
    for policy, prompt_len in (
        (PyramidKV(budget=2048), 4096),
        (PyramidKV(budget=0.45), 4096),
        (pyramid(SnapKV(budget=2048)), 4096),
    ):
        bound = policy.bind(tiny.config)
        slots = [bound.layer(spec).capacity for spec in layer_specs(tiny.config, 1, prompt_len, 16, jnp.float32)]
        assert slots[0] > 1.5 * slots[1]


HEADWISE = {
    "adakv": AdaKV(budget=100),
    "catekv": get_policy("catekv", budget=128, profile=(("consistent", "adaptive"),) * 2),
    "chelsea": get_policy("chelsea", budget=100, outliers=False),
    "knorm": KNorm(budget=100, dense_layers=1),
    "pyramidkv": PyramidKV(budget=0.05),
    "tree": TreeKV(budget=100),
}


@by_name("name", HEADWISE)
def test_what_is_dropped_is_freed_and_not_masked(name):
    """Bytes held: those of the kept slots, in every head and layer, and not of the prompt's length."""
    policy = HEADWISE[name].bind(TINY)
    state = [jax.eval_shape(policy.layer(spec).init) for spec in layer_specs(TINY, 2, 6000, 16, jnp.bfloat16)]
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    full = Full().nbytes(TINY, 2, 6000, 16, jnp.bfloat16)
    share = {"catekv": 0.52, "knorm": 0.55, "pyramidkv": 0.1}.get(name, 0.05)
    assert held == policy.nbytes(TINY, 2, 6000, 16, jnp.bfloat16) < share * full


@dataclasses.dataclass(frozen=True)
class Windowed(Case):
    """A layer with a sliding window of 10 tokens, as Mistral's."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, window=10)


ALL_OF_THEM = [
    ClusterKV(budget=64, sinks=2, dense_layers=0, n_clusters=5, cluster_decode=False),
    InfiniGen(budget=64, dense_layers=0, alpha=1e9, share=1.0, profile="prompt"),
    Quest(budget=64, page=4, dense_layers=0),
    ShadowKV(budget=48, rank=16, chunk=4, outlier_chunks=0, local_chunks=1),
]
"""Policies that select, and have a budget for all that there is."""


@by_name("policy", [Full(), AdaKV(), H2O(), CaM(), *ALL_OF_THEM], ids=lambda policy: policy.info.name)
def test_a_sliding_window_ends_the_view(policy):
    """A query sees its own token and the nine before, whatever the policy keeps besides."""
    case = Windowed(**vars(make_case(45, LENGTHS, 4)))
    assert policy not in ALL_OF_THEM or policy.layer(case.spec).attention == "sparse"
    _, outputs, _ = run(policy, case)
    for row, length in enumerate(LENGTHS):
        pos = length + 3
        seen = range(max(0, pos - 9), pos + 1)
        for n in range(4):
            keys = np.stack([rotate(ROPE, case.k[row, p, n // 2], p) for p in seen])
            probs = softmax(keys @ rotate(ROPE, case.q[row, pos, n], pos) / np.sqrt(8))
            np.testing.assert_allclose(outputs[3, row, n], probs @ case.v[row, list(seen), n // 2], atol=2e-5)
