"""One case of the kernel benchmark: an operation at one shape, its implementations, and a check of their results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """An operation at one shape and dtype.

    Attributes:
        operation: name of the public function.
        shape: the shape in words, such as "B32 K8 G4 C8192 H128, lengths ragged". Result files identify cases by it.
        dtype: dtype of the large inputs.
        inputs: returns new random inputs on the device, for a seed.
        variants: implementations by name, as functions of the inputs. All compute the same; the benchmark jits them.
            Names without spaces, such as "xla", "auto" and "cudnn", are always timed. Names with spaces contain block
            sizes, such as "gpu rows=64 warps=4", and are timed with `--tune` only.
        error: returns the relative error of a variant, given inputs and outputs: ||out - ref|| / ||ref||, or the share
            of wrong entries if they are discrete. It compares with float64 NumPy on the host, for a sample if
            everything would take long.
        tolerance: largest acceptable error.
        bytes: minimum number of bytes moved through device memory: each necessary input read once, each output written
            once.
        flops: floating-point operations of the matmuls; 0 if they cannot be the bottleneck.
        sizes: block sizes of the variants whose names contain them. Only for operations that support `--rules`.
        tuned_by: operation and properties that a rule of block sizes for this case tests; see
            `kvjax.pallas_kernels.tuning.tuned`. Only for operations that support `--rules`.
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
    """Return ||out - expected|| / ||expected||, or infinity if `out` contains NaN or infinity."""
    out = np.asarray(out, np.float64)
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.linalg.norm(out - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))
