"""Which way of splitting a chunk in two halves keeps the most similarity between them (Chelsea, theorem 6.1), by brute force.

The theorem says that where similarity depends on distance alone, falls with it, and falls ever more slowly, no split has a
larger sum over *all* pairs of one token of each half than the alternating one. It speaks of that sum, not of best edges.
"""

from collections.abc import Collection, Sequence
from itertools import combinations


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
