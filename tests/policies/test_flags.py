"""Policies under JAX's flags: those that users set for their own code change nothing, and break nothing."""

import contextlib
import functools
import json

import golden_values
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies.driver import TINY, each, every_policy, make_case

import kvjax
from kvjax._util.randomness import random_key
from kvjax.cache import layer_specs
from kvjax.models import abstract
from kvjax.policies import ClusterKV, Compactor
from kvjax.policies.clusterkv import ClusterKVLayer
from kvjax.policies.families.noise import uniform
from kvjax.runtime import decoding
from kvjax.runtime.sampling import make_sampler

FLAGS = {
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_legacy_prng_key": "error",
    "jax_default_prng_impl": "unsafe_rbg",
    "jax_random_seed_offset": 7,
    "jax_threefry_partitionable": False,
    "jax_default_matmul_precision": "highest",
}


@contextlib.contextmanager
def flags(**values):
    """The flags within, and as they were after."""
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.rotating  # those of the default tier run for every commit
@each(every_policy(16), often=True)
def test_programs_are_traced_under_all_flags(policy):
    """In 32 bits, with flags that refuse what code may do by accident."""
    specs = layer_specs(TINY, 2, 64, 12, jnp.dtype("float32"))
    rows, seeds = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    prompt = jax.ShapeDtypeStruct((2, 64), jnp.int32), rows, rows, seeds
    with flags(**FLAGS):
        how = make_sampler(0.5, 4, 0.9, 0.1), np.asarray([-1], np.int32)
        state, logprob = decoding.prefill.shapes(policy, specs, abstract(TINY), *prompt, *how)
        after, *_ = decoding.decode.shapes(policy, specs, abstract(TINY), state, np.int32(3), *how)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    assert (
        max(leaf.dtype.itemsize for leaf in jax.tree.leaves((state, logprob)) if leaf.dtype != jax.dtypes.float0) <= 4
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("rkv", "snapkv") else [pytest.mark.slow])
        for name in golden_values.cases()
    ],
)
def test_values_do_not_depend_on_flags(name):
    recorded = json.loads(golden_values.FILE.read_text(encoding="utf-8"))[name]
    with flags(**FLAGS):
        got = golden_values.record(name, golden_values.model(), golden_values.texts())
    assert {**got, "logprobs": None} == {**recorded, "logprobs": None}
    np.testing.assert_allclose(got["logprobs"], recorded["logprobs"], rtol=0, atol=1e-5)


def draws(spec, rows):
    """What policies and the sampler draw for some rows, by their places and seeds."""
    place = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (len(rows), 24))
    seeds, logits = jnp.asarray(rows, jnp.uint32), jnp.zeros((len(rows), 64))
    return {
        "noise": jnp.moveaxis(uniform(spec, 3, place), 0, 1),
        "sketch": jnp.broadcast_to(Compactor().sketch_of(spec)[None], (len(rows), 2, 8, 48)),
        "clusters": ClusterKVLayer(ClusterKV(), spec).shuffled(place, jnp.ones(place.shape, bool)),
        "samples": make_sampler(1.0)(logits, seeds, jnp.asarray(rows, jnp.int32)),
    }


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_random_numbers_of_a_row_are_its_own(implementation):
    """Whatever other rows there are, and whatever implementation of keys is the default."""
    spec = make_case(0, [24], 1).spec
    usual = draws(spec, [5, 6, 7])
    with jax.default_prng_impl(implementation):
        together, alone = jax.jit(functools.partial(draws, spec, [5, 6, 7]))(), draws(spec, [6])
    for name, expected in usual.items():
        np.testing.assert_allclose(together[name], expected, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(alone[name][0], expected[1], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("seed", [-1, 5, 2**31, 2**32 - 1, 2**40 + 3, np.int64(-7), np.uint32(2**32 - 1)])
def test_keys_do_not_depend_on_flags(seed):
    """Negative and large seeds have a remainder modulo 2**32, in 64 bits too."""
    usual = jax.random.key_data(random_key(seed))
    np.testing.assert_array_equal(usual, jax.random.key_data(jax.random.key(np.uint32(int(seed) % 2**32))))
    with flags(jax_enable_x64=True, jax_random_seed_offset=7):
        np.testing.assert_array_equal(jax.random.key_data(random_key(seed)), usual)


def test_rows_sample_as_if_alone_with_other_keys(tiny):
    prompts, options = [[5, 9, 2], [7, 1, 3, 4], [8]], {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    usual = kvjax.generate(tiny, prompts, **options)
    decoding.prefill.forget()
    decoding.decode.forget()
    with jax.default_prng_impl("unsafe_rbg"):
        together = kvjax.generate(tiny, prompts, **options)
        alone = kvjax.generate(tiny, prompts[1], seed=1, **options)
    decoding.prefill.forget()
    decoding.decode.forget()
    assert [row.tokens for row in together] == [row.tokens for row in usual]
    assert alone.tokens == together[1].tokens


def test_programs_run_where_jit_is_disabled(tiny):
    """JAX runs nothing that was compiled ahead of time under `jax_disable_jit`, and keeps no caches when it looks for leaks."""
    prompts, options = [[5, 9, 2], [7, 1, 3, 4]], {"policy": "snapkv:24,window=4", "max_new_tokens": 8}
    usual = kvjax.generate(tiny, prompts, **options)
    decoding.prefill.forget()
    with flags(jax_disable_jit=True, jax_check_tracer_leaks=True):
        found = kvjax.generate(tiny, prompts, **options)
    assert [row.tokens for row in found] == [row.tokens for row in usual]
