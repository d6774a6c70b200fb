"""The cases that the device tests check: what an H200 gets for them, lowered without one."""

import jax
import pytest
from kernels.lowering import on

from benchmarks import kernel_cases

CASES = [
    case
    for module in kernel_cases.modules()
    for case in kernel_cases.cases(module)
    if case.operation != "prefill_attention"  # cuDNN's, which JAX looks for even to lower it
]

CALLS = "__gpu$xla.gpu.triton", "mosaic_gpu"


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation}, {case.shape}, {case.dtype}")
def test_the_body_is_there(case):
    """Lowered with a kernel of ours, where XLA is not as fast."""
    with on():
        traced = jax.jit(case.variants.get("gpu", case.variants["auto"])).trace(*jax.eval_shape(lambda: case.inputs(0)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    plain = "64 keys" in case.shape and case.dtype == "float32"
    assert any(call in text for call in CALLS) != plain
