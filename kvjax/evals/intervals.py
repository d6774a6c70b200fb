"""Standard errors and 95 % intervals of means. Intervals use Student's t, so for few samples they are wider than two standard errors."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
"""Confidence level of intervals."""


def standard_error(samples: Any) -> float:
    """Standard error of the mean; NaN for a single sample.

    Example:
        >>> from kvjax.evals.intervals import standard_error
        >>> round(standard_error([1.0, 2.0, 3.0, 4.0]), 3)
        0.645
    """
    return float(np.std(samples, ddof=1)) / len(samples) ** 0.5 if len(samples) > 1 else float("nan")


def mean_interval(samples: Any) -> tuple[float, float]:
    """The mean of some numbers, and half the width of its interval; NaN for a single sample.

    Example:
        >>> from kvjax.evals.intervals import mean_interval
        >>> mean, half = mean_interval([1.0, 2.0, 3.0, 4.0])  # 95 %, Student's t
        >>> round(mean, 2), round(half, 2)
        (2.5, 2.05)
    """
    return means_interval([samples])


def means_interval(groups: Iterable[Any]) -> tuple[float, float]:
    """The mean over groups of their means, and half the width of its interval; groups are independent.

    Degrees of freedom are Welch's and Satterthwaite's: of variances v_i of means of n_i samples, (Σ v_i)² / Σ (v_i² / (n_i - 1)).
    If all samples of each group are equal, their variance says nothing. A share p of other samples, which may differ by 1 as scores do,
    would then have been missed with probability (1 - p)^n. The width is the p at which this is 1 - LEVEL, about 3 / n (the rule of three).

    Example:
        >>> from kvjax.evals.intervals import means_interval
        >>> mean, half = means_interval([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
        >>> round(mean, 2), round(half, 2)
        (0.5, 0.65)
    """
    arrays = [np.asarray(list(group), float) for group in groups]
    mean = float(np.mean([np.mean(array) for array in arrays]))
    if min(len(array) for array in arrays) < 2:
        return mean, float("nan")
    if all(np.allclose(array, array[0], rtol=1e-9, atol=1e-12) for array in arrays):  # equal but for rounding
        return mean, 1 - (1 - LEVEL) ** (1 / sum(map(len, arrays)))
    variances = np.asarray([np.var(array, ddof=1) / len(array) for array in arrays])
    total = float(np.sum(variances))
    freedom = total**2 / sum(v**2 / (len(array) - 1) for v, array in zip(variances, arrays, strict=True))
    return mean, float(stdtrit(freedom, (1 + LEVEL) / 2)) * total**0.5 / len(arrays)
