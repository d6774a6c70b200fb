"""LagKV, literally: segments, and what varies most in the range of the segment after, in NumPy loops. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest, softmax

FACTS = {
    "lagkv": Facts(
        published={"sinks": 16, "lag": 128},
        least={"sinks": 0, "lag": 2},
        budgets=(({"sinks": 16}, 17),),
        small={"lag": 6},
        golden={"budget": 14, "sinks": 2, "lag": 4},
        tier="slow",
        whole_prompts=True,
    ),
}


def varied(segment: np.ndarray, following: np.ndarray) -> np.ndarray:
    """For each of a segment's L tokens [L, d], how much it varies over channels, in the range of the segment after it."""
    low, high = following.min(axis=0), following.max(axis=0)
    relative = np.where(high > low, (segment - low) / np.where(high > low, high - low, 1), 0)
    return softmax(relative.std(axis=1, ddof=1))  # as torch.std


def survivors(keys: np.ndarray, values: np.ndarray, budget: int, sinks: int, lag: int) -> list[int]:
    """Which of n tokens one head keeps, ascending; rotated keys and values [n, d], float64."""
    n = len(keys)
    if n <= budget:
        return list(range(n))
    segments = []
    start = sinks
    while start + lag <= n:
        segments.append(range(start, start + lag))
        start += lag
    scored = segments[:-1]
    always = [pos for pos in range(n) if not any(pos in segment for segment in scored)]
    if len(always) >= budget:
        return [*range(sinks), *range(n - (budget - sinks), n)]
    share = (budget - len(always)) // len(scored)
    kept = set(always)
    for segment, following in zip(scored, segments[1:], strict=True):
        scores = varied(keys[segment], keys[following]) + varied(values[segment], values[following])
        kept |= {segment.start + i for i in highest(scores, range(lag), share)}
    return sorted(kept)
