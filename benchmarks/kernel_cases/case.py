"""One row of the kernel benchmark: an operation at one shape, its implementations, and how to tell that they are right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """An operation at one shape and dtype.

    Attributes:
        operation: name of the public function.
        shape: the shape in words, such as "B32 K8 G4 C8192 H128, lengths ragged".
        dtype: of the large inputs.
        inputs: fresh random inputs on the device, from a seed.
        variants: functions of the inputs, all computing the same, by name: "xla", "cudnn" where it applies, "auto", "gpu" and
            for tuning "gpu 128x64" with block sizes named. They are jitted by the benchmark.
        error: relative error (||out - ref|| / ||ref||, or the share of wrong entries where they are discrete) of one variant's
            outputs, against float64 NumPy on the host: of a sample where all would take long. Args are inputs and outputs.
        tolerance: the largest error that is right.
        bytes: fewest bytes that must be moved through device memory: each input that counts read once, each output written once.
        flops: floating-point operations that must be done.
        sizes: the block sizes of variants that have them in their names.
        tuned_by: the operation and what rules about block sizes ask about, which holds for this case alone.
    """

    operation: str
    shape: str
    dtype: str
    inputs: Callable[[int], tuple[Any, ...]]
    variants: Mapping[str, Callable[..., Any]]
    error: Callable[[tuple[Any, ...], Any], float]
    tolerance: float
    bytes: int
    flops: int
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tuned_by: tuple[str, Mapping[str, Any]] = ("", {})


def relative_error(out: Any, expected: np.ndarray) -> float:
    """||out - expected|| / ||expected||; infinite where anything is NaN."""
    out = np.asarray(out, np.float64)
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))
