"""How sure a mean is: 95 % intervals by Student's t, which for few samples are wider than two standard errors."""

from collections.abc import Iterable

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
"""Of intervals."""


def mean_interval(samples: Iterable[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval; NaN for a single sample, of which it is not known."""
    return means_interval([samples])


def means_interval(groups: Iterable[Iterable[float]]) -> tuple[float, float]:
    """The mean over groups of their means, and half the width of its interval, where samples of each group are drawn apart.

    Degrees of freedom are Welch's and Satterthwaite's: of variances v_i of means of n_i samples, (Σ v_i)² / Σ (v_i² / (n_i - 1)).
    Where all samples of each group are equal there is no width.
    """
    arrays = [np.asarray(list(group), float) for group in groups]
    mean = float(np.mean([np.mean(array) for array in arrays]))
    if min(len(array) for array in arrays) < 2:
        return mean, float("nan")
    variances = np.asarray([np.var(array, ddof=1) / len(array) for array in arrays])
    total = float(np.sum(variances))
    if total == 0:
        return mean, 0.0
    freedom = total**2 / sum(v**2 / (len(array) - 1) for v, array in zip(variances, arrays, strict=True))
    return mean, float(stdtrit(freedom, (1 + LEVEL) / 2)) * total**0.5 / len(arrays)
