"""Slots of stores where they are missing, by every implementation, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import fetch_slots
from kvjax.pallas_kernels.op import Unsupported


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [2, 6])
def test_missing_slots_are_read_and_others_kept(implementation, dtype, heads):
    """21 slots: no whole number of a kernel's runs, which pass from one head to the next."""
    random = np.random.default_rng(0)
    stores = [to_jax(random.normal(size=(3, 2, 40, 16)), dtype) for _ in "kv"]
    index = random.integers(0, 40, (3, heads, 21))
    missing = random.random(index.shape) < 0.4
    got = [to_jax(random.normal(size=(*index.shape, 16)), dtype) for _ in "kv"]
    found = fetch_slots(
        stores,
        to_jax(index, jnp.int32),
        to_jax(missing),
        got,
        implementation=implementation,
        interpret=implementation != "xla",
    )
    for store, old, new in zip(*jax.device_get((stores, got, list(found))), strict=True):
        want = np.array(old)
        for row, head, place in np.argwhere(missing):
            want[row, head, place] = store[row, head // (heads // 2), index[row, head, place]]
        np.testing.assert_array_equal(new, want)


def test_heads_that_no_kernel_serves():
    zeros = ((1, 1, 8, 24), jnp.float32), ((1, 1, 4), jnp.int32), ((1, 1, 4), bool), ((1, 1, 4, 24), jnp.float32)
    store, index, missing, got = (to_jax(np.zeros(shape), dtype) for shape, dtype in zeros)
    with pytest.raises(Unsupported, match="power of two"):
        fetch_slots([store], index, missing, [got], implementation="gpu", interpret=True)
