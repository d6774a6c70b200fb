"""Sums of values by index, by every implementation, against loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import index_sums
from kvjax.pallas_kernels.index_sums import reference
from kvjax.pallas_kernels.op import Unsupported


def draw(count):
    """Indices, of which some are negative, values, and their sums."""
    rng = np.random.default_rng(count)
    index, values = rng.integers(-1, count, (2, 3, count)), rng.normal(size=(2, 3, count)).astype(np.float32)
    expected = np.zeros_like(values)
    for b, h, j in np.ndindex(values.shape):
        if index[b, h, j] >= 0:
            expected[b, h, index[b, h, j]] += values[b, h, j]
    return to_jax(index, "int32"), to_jax(values), expected


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 50, 300])
def test_values_are_summed_by_index(count, implementation):
    """For any number of values, square or not, smaller or larger than a program's."""
    index, values, expected = draw(count)
    got = index_sums(index, values, implementation=implementation, interpret=implementation != "xla")
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_parts_do_not_matter(monkeypatch):
    """XLA takes some values at a time, which need not divide their number, into the smallest square that has a place for all."""
    for count in (1, 2, 16, 17, 50):
        index, values, expected = draw(count)
        for numbers in (reference.AT_A_TIME, 40):
            monkeypatch.setattr(reference, "AT_A_TIME", numbers)
            got = jax.jit(lambda *args: reference.index_sums(*args))(index, values)
            np.testing.assert_allclose(got, expected, atol=1e-6)
        program = str(jax.make_jaxpr(reference.index_sums)(index, values))
        side = math.ceil(math.sqrt(count))
        assert f"f32[2,3,{side},{side}]" in program


def test_many_values_take_no_room_for_all_pairs():
    """Of 131,072 values in 64 heads they would take 4 TB."""
    index, values = (jax.ShapeDtypeStruct((8, 8, 131_072), dtype) for dtype in (jnp.int32, jnp.float32))
    compiled = jax.jit(reference.index_sums).lower(index, values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 400e6


def test_sums_are_in_float32():
    """The kernel leaves other values to XLA, which converts them."""
    index, values, expected = draw(17)
    half = jnp.asarray(values, jnp.bfloat16)
    with pytest.raises(Unsupported, match="values are bfloat16"):
        index_sums(index, half, implementation="gpu", interpret=True)
    got = index_sums(index, half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=0.05)
