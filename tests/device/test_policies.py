"""Every policy and transform on the device, against the CPU: tokens, kept slots, and log-probabilities."""

import dataclasses

import pytest
from device.models import BUDGET, SMALL, generated, same, small
from policies.driver import compositions, every_policy
from policies.surrogates import model_inputs

from kvjax.policies import ChunkKV, Policy, by_layer, offloaded, pyramid, quantized
from kvjax.policies import policies as registered

CHUNKS = ChunkKV(budget=BUDGET, window=8)


def named() -> dict[str, Policy]:
    """One of each registered policy, and transforms of some, nested ones too."""
    policies = {
        name: dataclasses.replace(policy, **model_inputs(type(policy), SMALL))
        for name, policy in zip(registered(), every_policy(BUDGET), strict=True)
    }
    heads, layers, *others = compositions(BUDGET)
    hosted = ["full", "chunkkv", "treekv", "h2o", "chelsea", "clusterkv", "quest", "infinigen", "shadowkv", "catekv"]
    return policies | {
        "by_head": heads,
        "by_layer(by_head)": layers,
        **{policy.info.name: policy for policy in others},
        **{f"offloaded({name})": offloaded(policies[name]) for name in hosted},
        "offloaded(quest, by layer)": offloaded(policies["quest"], 2, "layer"),
        "quantized(chunkkv)": quantized(CHUNKS, bits=4, group=16, residual=16),
        "pyramid(chunkkv)": pyramid(CHUNKS),
        "by_layer(quantized(pyramid), offloaded)": by_layer(
            [quantized(pyramid(CHUNKS), bits=8, group=16, residual=16), offloaded(policies["clusterkv"])]
        ),
    }


POLICIES = named()


@pytest.fixture(scope="module")
def params():
    return small()


@pytest.mark.parametrize("name", POLICIES)
def test_as_on_a_cpu(name, params, on_cpu):
    """A ragged batch, read and continued: the device's own kernels give what plain XLA gives on a CPU.

    What is fitted by least squares is compared by the attention that it gives.
    """
    policy = POLICIES[name]
    got = generated(policy, params)
    with on_cpu():
        want = generated(policy, params)
    same(got, want, fitted=policy.info.refits_values)
