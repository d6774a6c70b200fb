"""Generation over two devices of this machine: the tokens of one."""

import jax
import numpy as np
import pytest
from device.models import BUDGET, PROMPTS, small

import kvjax

pytestmark = pytest.mark.skipif(jax.local_device_count() < 2, reason="this machine has one device")

OPTIONS = {"max_new_tokens": 24, "ignore_eos": True, "budget": BUDGET}


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jax.numpy.asarray, small())


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


@pytest.mark.parametrize("mesh", ["model=2", "data=2", "sequence=2"])
@pytest.mark.parametrize("policy", ["full", "treekv", "snapkv", "chelsea", "chunkkv", "clusterkv", "adakv", "tova"])
def test_rows(policy, mesh, params):
    want = kvjax.generate(params, PROMPTS, policy, **OPTIONS)
    got = kvjax.generate(params, PROMPTS, policy, mesh=mesh, **OPTIONS)
    assert got[0].stats.devices == 2
    same(got, want)


@pytest.mark.parametrize("mesh", ["model=2", "sequence=2"])
@pytest.mark.parametrize("policy", ["full", "treekv", "snapkv", "quest"])
def test_a_prompt_read_in_blocks(policy, mesh, params):
    options = OPTIONS | {"prefill_block": 32, "question": [5, 9, 2]}
    want = kvjax.generate(params, PROMPTS[0], policy, **options)
    same([kvjax.generate(params, PROMPTS[0], policy, mesh=mesh, **options)], [want])
