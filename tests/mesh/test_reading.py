"""Prompts that are prefilled a few rows at a time over several devices: as whole on one."""

import numpy as np
import pytest

import kvjax
from kvjax.runtime import decoding, reading


@pytest.mark.rotating
@pytest.mark.parametrize("policy", ["full", "snapkv:40", "treekv:32", "adakv:32"])
@pytest.mark.parametrize("mesh", ["model=2", "sequence=2", "data=2,model=2"])
def test_groups_of_rows_over_a_mesh(policy, mesh, tiny, monkeypatch):
    random = np.random.default_rng(7)
    prompts = [random.integers(0, 64, size).tolist() for size in (50, 9, 33, 40)]
    options = {"max_new_tokens": 9, "ignore_eos": True}
    want = kvjax.generate(tiny, prompts, policy, **options)
    monkeypatch.setattr(reading, "GROUP_TOKENS", 64)
    decoding.prefill.forget()
    got = kvjax.generate(tiny, prompts, policy, mesh=mesh, **options)
    decoding.prefill.forget()
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
