"""The alternating partition against all others."""

import numpy as np
import pytest

from reproduction.analyses import partition


def test_worked_example_of_six_tokens():
    f = (5, 3, 2, 1.5, 1.25)
    assert partition.alternating(3) == (1, 3, 5)
    assert partition.between((1, 3, 5), f) == 32.25
    assert partition.between((1, 2, 3), f) == 21.25
    top, halves = partition.best(f)
    assert top == 32.25
    assert (1, 3, 5) in halves


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_alternating_is_best_for_random_convex_functions(n):
    random = np.random.default_rng(n)
    for _ in range(20):
        drops = np.sort(random.exponential(size=2 * n - 2))[::-1]  # ever smaller, never negative
        f = (random.normal() - np.concatenate([[0.0], np.cumsum(drops)])).tolist()
        top, halves = partition.best(f)
        assert partition.between(partition.alternating(n), f) == pytest.approx(top)
        assert partition.alternating(n) in halves


def test_alternating_is_not_best_for_all_functions():
    """The theorem needs its conditions: where similarity rises with distance, halves side by side are better."""
    f = (0.0, 1.0, 2.0, 3.0, 4.0)
    top, halves = partition.best(f)
    assert halves == [(1, 2, 3)]
    assert partition.between(partition.alternating(3), f) < top


@pytest.mark.parametrize("size", [2, 19])
def test_a_number_of_distances_that_cannot_be_tried(size):
    with pytest.raises(ValueError, match="2n - 1, and n up to 9"):
        partition.best([1.0] * size)
