"""What can be told of a policy before there is a model: exactly what binding it to any model would tell."""

import dataclasses

import jax.numpy as jnp
import pytest
from policies.driver import TINY, compositions, every_policy, offloads
from policies.surrogates import model_inputs

from kvjax.cache import layer_specs
from kvjax.policies import Policy, PolicyError, get_policy, policies
from kvjax.policies.layer import check_reads_blocks
from kvjax.policies.unbound import check_unbound

MODEL = TINY.with_depth(8)
"""More layers than any policy leaves as they are."""

TRANSFORMS = (
    "{}",
    "offloaded({})",
    "quantized({}; group=16)",
    "prompt_only({})",
    "chunkkv({})",
    "critical({})",
    "by_layer({}; full; full; full; full; full; full; full)",
)


def given(name: str) -> Policy:
    """A policy with what it needs of `MODEL`."""
    return get_policy(name, **model_inputs(policies()[name], MODEL))


def refusal(policy: Policy, block: int | None) -> str | None:
    """What comes of binding a policy, and of making its layers."""
    try:
        bound = policy.bind(MODEL)
        for spec in layer_specs(MODEL, 1, 4096, 64, jnp.bfloat16):
            bound.layer(spec)
        for spec in layer_specs(MODEL, 1, 64, 64, jnp.bfloat16, block=block or 0) if block else ():
            check_reads_blocks(bound.layer(spec))
    except PolicyError as error:
        return str(error)
    return None


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_model_would_be_needed_for_is_found_without_one(transform):
    for name in policies():
        outer, policy = (
            get_policy(transform.format("snapkv" if "critical" in transform or "chunkkv" in transform else "full")),
            given(name),
        )
        if transform.startswith("by_layer"):
            policy = dataclasses.replace(outer, layers=(policy, *outer.layers[1:]))
        elif transform == "prompt_only({})":
            policy = type(outer)(policy)
        elif transform != "{}":
            policy = dataclasses.replace(outer, policy=policy)
        for block in (None, 64):
            want = refusal(policy, block)
            try:
                check_unbound(policy, block)
                found = None
            except PolicyError as error:
                found = str(error)
            assert (found is None) == (want is None), (name, found, want)


def test_what_runs_is_not_refused():
    for policy in (*every_policy(24), *compositions(24), *offloads(24)):
        check_unbound(policy)


def test_no_weights_and_no_mesh():
    for text in ("kvzap", "prompt_only(fast_kvzip)", "by_layer(full; kvzap:0.5)"):
        with pytest.raises(
            PolicyError, match=r"no weights are given, and none come with kvjax. Give those of .* as weights=PATH"
        ):
            check_unbound(get_policy(text))
    with pytest.raises(PolicyError, match="caches in host memory are not supported over a mesh"):
        check_unbound(get_policy("by_layer(full; offloaded(full))"), over_mesh=True)
    check_unbound(get_policy("offloaded(full)"))
