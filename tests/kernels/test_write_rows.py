"""Rows written into an array, by every implementation, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import write_rows
from kvjax.pallas_kernels.op import Unsupported


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("shape", [(5, 2, 7, 16), (4, 5000), (3,)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_rows_are_copied(shape, dtype, implementation):
    """Rows beyond the array, on either side, are ignored. Others do not change."""
    rng = np.random.default_rng(0)
    array, values = (to_jax(rng.integers(-99, 99, (count, *shape[1:])), dtype) for count in (shape[0], 4))
    rows = np.array([2, shape[0], 0, -1])
    expected = np.array(array)
    for at, value in zip(rows, np.asarray(values), strict=True):
        if 0 <= at < len(expected):
            expected[at] = value
    got = write_rows(
        array, to_jax(rows, "int32"), values, implementation=implementation, interpret=implementation != "xla"
    )
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected.astype(np.float32))


def test_other_types_are_left_to_xla():
    """For example Booleans."""
    array, rows = jnp.zeros((3, 4), bool), to_jax([1], "int32")
    with pytest.raises(Unsupported, match="the array is bool"):
        write_rows(array, rows, array[:1], implementation="gpu", interpret=True)
    np.testing.assert_array_equal(write_rows(array, rows, ~array[:1]).any(axis=1), [False, True, False])
