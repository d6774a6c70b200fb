"""Successive halving: measure all candidates on a few examples, and the better half on twice as many, until two are left.

Karnin, Koren and Somekh (2013), "Almost optimal exploration in multi-armed bandits". All candidates of a round have the
same examples, so differences between them are paired.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

FINALISTS = 2
"""Candidates that are measured on all examples."""


@dataclasses.dataclass(frozen=True)
class Halving(Generic[T]):
    """Result of successive halving.

    Attributes:
        order: all candidates, best first. Those of a later round come before those of an earlier one.
        scores: every candidate's scores of the first examples, as many as it was measured on.
        sizes: examples of each round.
    """

    order: tuple[T, ...]
    scores: Mapping[T, tuple[float, ...]]
    sizes: tuple[int, ...]

    @property
    def finalists(self) -> tuple[T, ...]:
        """The candidates that were measured on all examples, best first."""
        return tuple(each for each in self.order if len(self.scores[each]) == self.sizes[-1])


def round_sizes(candidates: int, examples: int, least: int = 4) -> tuple[int, ...]:
    """Examples of each round: twice as many as in the round before, and all in the last.

    Args:
        candidates: number of candidates.
        examples: number of examples.
        least: minimum number of examples of a round, if there are so many.
    """
    rounds = 1 + max(0, math.ceil(math.log2(max(candidates, 1) / FINALISTS)))
    sizes = [math.ceil(examples / 2 ** (rounds - 1 - i)) for i in range(rounds)]
    return tuple(min(max(size, least), examples) for size in sizes)


def halve(
    candidates: Sequence[T],
    score: Callable[[T, int], Sequence[float]],
    sizes: Sequence[int],
) -> Halving[T]:
    """Find the best candidates by successive halving.

    Each round keeps the better half, rounded up, by the mean score. Equal means keep the order of the candidates.

    Args:
        candidates: hashable and different.
        score: called with a candidate and a number n; returns its scores of the first n examples. Higher is better.
        sizes: examples of each round, as of `round_sizes`.

    Raises:
        ValueError: there is no candidate, or sizes are not ascending positive numbers.
    """
    if not candidates or not sizes or min(sizes) < 1 or list(sizes) != sorted(sizes):
        raise ValueError(f"sizes={list(sizes)}, {len(candidates)} candidates; give candidates and ascending sizes")
    left, order = list(candidates), list[T]()
    scores: dict[T, tuple[float, ...]] = {}
    for i, size in enumerate(sizes):
        for each in left:
            scores[each] = tuple(score(each, size))
        left.sort(key=lambda each: -float(np.mean(scores[each])))
        if i < len(sizes) - 1:
            kept = max(FINALISTS, math.ceil(len(left) / 2))
            left, dropped = left[:kept], left[kept:]
            order = dropped + order
    return Halving(tuple(left + order), scores, tuple(sizes))
