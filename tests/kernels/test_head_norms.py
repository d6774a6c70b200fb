"""Norms of query and key heads, by every implementation, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import Norm, head_norms
from kvjax.pallas_kernels.op import Unsupported


def draw(rows, dtype, dim=16):
    random = np.random.default_rng(rows)
    q, k = (to_jax(random.normal(size=(rows, count, dim)), dtype) for count in (5, 2))
    return q, k, to_jax(random.normal(size=dim), dtype), to_jax(random.normal(size=dim), dtype)


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("implementation", "dtype"), [("xla", "float32"), ("gpu", "float32"), ("gpu", "bfloat16")])
def test_heads_are_normed(implementation, dtype, rows, offset):
    """Queries by the first gain and keys by the second."""
    q, k, *gains = draw(rows, dtype)
    norms = [Norm(gain, 1e-2, offset) for gain in gains]
    got = head_norms(q, k, *norms, implementation=implementation, interpret=implementation == "gpu")
    for x, gain, normed in zip((q, k), gains, got, strict=True):
        wide, factor = np.asarray(x, np.float64), np.asarray(gain, np.float64) + (offset or 0.0)
        expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-2) * factor
        assert normed.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(normed, np.float64), expected, atol=1e-6 if dtype == "float32" else 3e-2)


def test_what_the_kernel_does_not_support():
    q, k, *gains = draw(1, "float32")
    norm, other = Norm(gains[0], 1e-2), Norm(gains[1], 1e-3)
    for given, says in (
        ((q, k, norm, other), "the norms of queries and keys differ"),
        ((jnp.zeros((2000, 1, 16)), jnp.zeros((2000, 1, 16)), norm, norm), "2000 tokens are more than 1024"),
    ):
        with pytest.raises(Unsupported, match=says):
            head_norms(*given, implementation="gpu", interpret=True)
