"""The values that layers declare agree with their functions, for every policy."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from policies.driver import TINY, Case, compiled, compositions, each, every_policy, make_case, offloads
from policies.facts import all_facts

from kvjax.cache import LayerCache
from kvjax.policies import (
    TOVA,
    CacheLayer,
    Full,
    KVzip,
    StreamingLLM,
    by_layer,
    offloaded,
    policies,
    prompt_only,
    quantized,
)
from kvjax.policies.cam import CaMLayer
from kvjax.policies.families.dense import DenseLayer
from kvjax.policies.families.scoring import ScoreEvictionLayer
from kvjax.policies.families.sparse import SparseLayer

POLICIES = [
    *every_policy(budget=16),
    *compositions(budget=16),
    *offloads(budget=16),
    quantized(Full(), bits=8, group=4, residual=16).bind(TINY),
    prompt_only(TOVA(budget=16)),
    prompt_only(StreamingLLM(budget=16, sinks=2)),
    offloaded(by_layer([Full(), Full()])).bind(TINY),
    KVzip(budget=16, scope="head"),
]


def case() -> Case:
    """As in the invariants."""
    return make_case(22, [50, 3, 16, 17], steps=12)


def layers(policy: Any) -> list[CacheLayer[Any]]:
    """A policy's layer, and those that it is made of."""
    layer = policy.layer(case().spec)
    return [layer, *(part.layer for part in getattr(layer, "parts", ()))]


def is_cache(x: Any) -> bool:
    return isinstance(x, LayerCache)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.info.name)
def test_what_is_declared_is_what_the_functions_do(policy):
    for layer in layers(policy):
        cls = type(layer)
        assert (layer.when == "when_full") <= (cls.is_due is not CacheLayer.is_due)
        assert (layer.reads == "blocks") <= (cls.read_block is not CacheLayer.read_block)
        assert (layer.reads == "tokens") <= (cls in (CaMLayer, ScoreEvictionLayer)), "which read blocks token by token"
        assert (layer.attention == "sparse") <= isinstance(layer, SparseLayer)
        assert (layer.attention == "dense") <= (layer.max_kept == layer.spec.max_tokens)
        assert isinstance(layer, DenseLayer) <= (layer.attention == "dense")


@each(POLICIES)
def test_who_never_compresses_leaves_the_state_alone(policy):
    for layer in layers(policy):
        state = jax.eval_shape(layer.init)
        if layer.when == "never":
            after = layer.compress(state)
            same = [x is y for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)]
            assert all(same), layer
        if layer.when == "when_full":
            told = jax.eval_shape(layer.is_due, state)
            assert told.shape == (layer.spec.batch,)
            assert told.dtype == bool


@each(POLICIES)
def test_who_compresses_by_keys_and_values_says_so(policy):
    for layer in layers(policy):
        state = jax.eval_shape(layer.init)
        kv = jax.tree.map(
            lambda x: x.replace(**dict.fromkeys(x.__dict__, False) | {"k": True, "v": True}) if is_cache(x) else False,
            state,
            is_leaf=is_cache,
        )
        jaxpr = jax.make_jaxpr(layer.compress)(state).jaxpr
        theirs = {id(var) for var, mine in zip(jaxpr.invars, jax.tree.leaves(kv), strict=True) if mine}
        used = any(id(var) in theirs for equation in jaxpr.eqns for var in equation.invars)
        assert used <= layer.compress_reads_kv, layer


def test_a_state_without_a_store_of_its_own_is_a_cache_or_has_one():
    for policy in POLICIES:
        layer = policy.layer(case().spec)
        assert layer.has_own_store or is_cache(jax.eval_shape(layer.init).cache)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.info.name)
def test_layers_are_hashable_and_equal(policy):
    """Programs are known by them."""
    one, other = (policy.layer(case().spec) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert compiled(policy, case().spec) is compiled(policy, case().spec)


def fields(policy: Any) -> Iterator[tuple[str, str, Any]]:
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        yield type(policy).__name__, field.name, value
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                yield from fields(part)


def test_hyperparameters_fit_the_small_cases():
    """Else the invariants hold without the method ever choosing: a new policy's sizes belong in `Facts.small`."""
    longest = int(case().lengths.max())
    large = {
        (name, field)
        for policy in every_policy(budget=16)
        for name, field, value in fields(policy)
        if isinstance(value, int) and value > longest
    }
    assert large == {
        (policies()[name].__name__, field) for name, facts in all_facts().items() for field in facts.bounds
    }
