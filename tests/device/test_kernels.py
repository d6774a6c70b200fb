"""Every operation, by the kernel that the device gets, against float64 NumPy at the shapes that models have."""

import logging

import jax
import pytest

from benchmarks import kernel_cases
from benchmarks.kernel_cases.case import Case
from kvjax.pallas_kernels.device import hopper
from kvjax.pallas_kernels.hopper.fused_decode_block.plan import plan

CASES = [case for module in kernel_cases.modules() for case in kernel_cases.cases(module)]

XLA_IS_AS_FAST = "vocabulary head", "64 keys, H128, biased"
"""Parts of the names of cases that Hopper GPUs may leave to XLA."""


REFUSED = {("fused_decode_block", "8 x 4096", "int4"): str(plan(8, 4096, 4096, 14336, (4096, 1024), bits=4))}
"""Reasons for which a kernel leaves a case to XLA on purpose, by operation, beginning of the shape, and type."""


def refusal(case: Case) -> str | None:
    """Why no kernel serves a case, if that is meant."""
    found = (
        why
        for (name, shape, kind), why in REFUSED.items()
        if case.shape.startswith(shape) and (case.operation, case.dtype) == (name, kind)
    )
    return next(found, None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}, {case.shape}, {case.dtype}")
def test_is_right(case, caplog):
    """What `auto` takes, which on a Hopper GPU is a kernel of its own but for what it refuses, is within the case's tolerance."""
    inputs = jax.block_until_ready(case.inputs(0))
    with caplog.at_level(logging.DEBUG, "kvjax.pallas_kernels.op"):
        run = jax.jit(case.variants["auto"]).lower(*inputs).compile()
    if hopper() and (why := refusal(case)):
        assert any(f": xla ({why}" in told for told in caplog.messages), caplog.messages
    elif hopper() and not any(name in case.shape for name in XLA_IS_AS_FAST):
        assert not any(": xla" in told for told in caplog.messages), caplog.messages
    assert case.error(inputs, jax.block_until_ready(run(*inputs))) <= case.tolerance
