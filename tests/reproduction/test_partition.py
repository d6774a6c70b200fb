"""Chelsea, theorem 6.1: the alternating split of a chunk keeps the most similarity between its halves, by brute force.

The theorem says that where similarity depends on distance alone, falls with it, and falls ever more slowly, no split has a
larger sum over *all* pairs of one token of each half than the alternating one. It speaks of that sum, not of best edges.
"""

from collections.abc import Collection, Sequence
from itertools import combinations

import numpy as np
import pytest


def between(half: Collection[int], f: Sequence[int | float]) -> float:
    """Sum of f over the distances of all pairs of a token of `half` and one of the other half.

    Args:
        half: n of the tokens 1 … 2n.
        f: similarity at distances 1 … 2n - 1.
    """
    others = [y for y in range(1, len(f) + 2) if y not in half]
    return float(sum(f[abs(x - y) - 1] for x in half for y in others))


def alternating(n: int) -> tuple[int, ...]:
    """The half 1, 3, … of 2n tokens."""
    return tuple(range(1, 2 * n, 2))


def best(f: Sequence[int | float]) -> tuple[float, list[tuple[int, ...]]]:
    """The largest sum between two halves, and every half with token 1 that reaches it (to rounding), all splits tried.

    Args:
        f: similarity at distances 1 … 2n - 1, for n up to 9.

    Raises:
        ValueError: there is no such n.
    """
    if len(f) % 2 == 0 or len(f) > 17:
        raise ValueError(f"f has {len(f)} distances; two halves of n tokens have 2n - 1, and n up to 9 can be tried")
    n = (len(f) + 1) // 2
    sums = {(1, *rest): between((1, *rest), f) for rest in combinations(range(2, 2 * n + 1), n - 1)}
    top = max(sums.values())
    return top, [half for half, total in sums.items() if total > top - 1e-9 * max(1.0, abs(top))]


def test_worked_example_of_six_tokens():
    f = (5, 3, 2, 1.5, 1.25)
    assert alternating(3) == (1, 3, 5)
    assert between((1, 3, 5), f) == 32.25
    assert between((1, 2, 3), f) == 21.25
    top, halves = best(f)
    assert top == 32.25
    assert (1, 3, 5) in halves


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_alternating_is_best_for_random_convex_functions(n):
    random = np.random.default_rng(n)
    for _ in range(20):
        drops = np.sort(random.exponential(size=2 * n - 2))[::-1]  # ever smaller, never negative
        f = (random.normal() - np.concatenate([[0.0], np.cumsum(drops)])).tolist()
        top, halves = best(f)
        assert between(alternating(n), f) == pytest.approx(top)
        assert alternating(n) in halves


def test_alternating_is_not_best_for_all_functions():
    """The theorem needs its conditions: where similarity rises with distance, halves side by side are better."""
    f = (0.0, 1.0, 2.0, 3.0, 4.0)
    top, halves = best(f)
    assert halves == [(1, 2, 3)]
    assert between(alternating(3), f) < top


@pytest.mark.parametrize("size", [2, 19])
def test_a_number_of_distances_that_cannot_be_tried(size):
    with pytest.raises(ValueError, match="2n - 1, and n up to 9"):
        best([1.0] * size)
