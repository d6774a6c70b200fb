"""CriticalKV, literally: two stages of choice by scores and by what values are projected to, in NumPy, float64."""

import math

import numpy as np
from policies.oracle_arrays import highest


def sizes(values: np.ndarray, output: np.ndarray) -> np.ndarray:
    """How much each value [n, H] makes of the output by projections [G, H, D] of a group: sums of sizes, mean over the group."""
    return np.abs(values @ output).sum(axis=-1).mean(axis=0)


def survivors(
    scores: np.ndarray,
    weights: np.ndarray,
    budget: int,
    *,
    first: int = 0,
    last: int = 0,
    share: float = 0.5,
    epsilon: float = 1e-4,
) -> list[int]:
    """Which of n tokens one head keeps, ascending, the first and last ones of which in any case."""
    n = len(scores)
    if n <= budget:
        return list(range(n))
    ends = [*range(first), *range(n - last, n)]
    between = range(first, n - last)
    sure = highest(scores, between, math.floor(share * budget) - len(ends))
    others = [i for i in between if i not in sure]
    more = highest((scores + epsilon) * weights, others, budget - len(ends) - len(sure))
    return sorted([*ends, *sure, *more])
