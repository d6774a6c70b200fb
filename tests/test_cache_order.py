"""Orders of short and long arrays."""

import jax
import numpy as np
import pytest
from arrays import to_jax

from kvjax.cache import order, stable_order


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("shape", [(1,), (2, 3, 17), (5, 40)])
def test_order_is_that_of_a_stable_sort(shape, dtype, monkeypatch):
    """Also with infinite and equal values, by both ways."""
    values = np.random.default_rng(0).integers(-5, 5, shape).astype(dtype)
    if dtype == "float32":
        values[..., 0] = np.inf
        values[..., -1] = -0.0
    expected = np.argsort(values, axis=-1, kind="stable")
    for most in (order.SHORT, 0):
        monkeypatch.setattr(order, "SHORT", most)
        found = jax.jit(lambda x: stable_order(x))(to_jax(values))
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)
