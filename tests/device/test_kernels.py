"""Every operation, by the kernel that the device gets, against float64 NumPy at the shapes that models have."""

import logging

import jax
import pytest

from benchmarks import kernel_cases
from kvjax.pallas_kernels.device import hopper

CASES = [case for module in kernel_cases.modules() for case in kernel_cases.cases(module)]

XLA_IS_AS_FAST = "vocabulary head", "64 keys, H128, biased"
"""Parts of the names of cases that Hopper GPUs may leave to XLA."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}, {case.shape}, {case.dtype}")
def test_is_right(case, caplog):
    """What `auto` takes, which on a Hopper GPU is a kernel of its own, is within the case's tolerance."""
    inputs = jax.block_until_ready(case.inputs(0))
    with caplog.at_level(logging.DEBUG, "kvjax.pallas_kernels.op"):
        run = jax.jit(case.variants["auto"]).lower(*inputs).compile()
    if hopper() and not any(name in case.shape for name in XLA_IS_AS_FAST):
        assert not any(": xla" in told for told in caplog.messages), caplog.messages
    assert case.error(inputs, jax.block_until_ready(run(*inputs))) <= case.tolerance
