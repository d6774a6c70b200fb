"""Lists of prompts through a running batch over several devices: as on one."""

import numpy as np
import pytest

import kvjax


@pytest.mark.parametrize("policy", ["full", "rkv:40", "treekv:32", "adakv:32", "quest:32"])
@pytest.mark.parametrize("mesh", ["model=2", "sequence=2"])
def test_lists_over_a_mesh(policy, mesh, tiny):
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 64, size).tolist() for size in (50, 9, 33, 40, 17)]
    options = {"max_new_tokens": [9, 14, 3, 8, 20], "rows": 2, "ignore_eos": True}
    one = kvjax.generate(tiny, prompts, policy, **options)
    many = kvjax.generate(tiny, prompts, policy, mesh=mesh, **options)
    for a, b in zip(one, many, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert many[0].stats.devices == 2


def test_an_axis_of_rows_has_batches_that_start_and_stop_together(tiny):
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    options = {"max_new_tokens": [4, 5, 6], "ignore_eos": True}
    one = kvjax.generate(tiny, prompts, **options)
    many = kvjax.generate(tiny, prompts, mesh="data=2", **options)
    assert [result.tokens for result in one] == [result.tokens for result in many]
