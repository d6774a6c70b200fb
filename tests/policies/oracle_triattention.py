"""TriAttention, literally: distances and angles of unrotated keys, with complex numbers, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE
from policies.oracle_recompress import Rounds

FACTS = {
    "triattention": Facts(
        published={"budget": 2048, "every": 128, "window": 128, "offsets": 17, "agg": "mean", "gqa": "max"},
        least={"every": 1, "window": 0, "offsets": 1},
        budgets=(({"window": 128}, 128),),
        golden={"budget": 12, "every": 4, "window": 4},
        tier="slow",
    ),
}


def halves(x: np.ndarray) -> np.ndarray:
    """Complex numbers of channels i and i + half."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def score(
    mean: np.ndarray,
    size: np.ndarray,
    key: np.ndarray,
    omega: np.ndarray,
    place: int | np.ndarray,
    seen: int,
    offsets: int,
    agg: str,
) -> np.ndarray:
    """Of one query head, by μ and ρ of each pair, and unrotated keys [..., F], as complex numbers, at places [...]."""
    by_distance, place = [], np.asarray(place)[..., None]
    for delta in (2**i for i in range(offsets)):
        angles = omega * (seen + delta - place) + np.angle(mean * key.conj())
        by_distance.append(np.sum(np.abs(mean) * np.abs(key) * np.cos(angles), axis=-1))
    spread = np.sum((size - np.abs(mean)) * np.abs(key), axis=-1)
    return (np.mean(by_distance, axis=0) if agg == "mean" else np.max(by_distance, axis=0)) + spread


class TriAttention(Rounds):
    """One row; `queries` [N, 3, F] are Re μ, Im μ and ρ of its query heads."""

    window, offsets, agg, gqa = 128, 17, "mean", "max"
    queries: np.ndarray

    def begin(self) -> None:
        super().begin()
        self.last = self.window

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        scores = np.zeros(len(entries))
        rivals = entries[: max(len(entries) - self.window, 0)]
        if not rivals:
            return scores + 4.0  # which changes no order, and says how near is equal
        own = self.queries[self.queries_of(head)].astype(np.float64)
        if self.gqa == "mean_stats":
            own = own.mean(axis=0, keepdims=True)
        normal = []
        for real, imaginary, size in own:
            found = score(
                real + 1j * imaginary,
                size,
                halves(self.k[rivals, head]),
                np.asarray(ROPE.inv_freq),
                np.asarray(rivals),
                self.seen,
                self.offsets,
                self.agg,
            )
            normal.append((found - found.mean()) / max(found.std(), 1e-6))
        scores[: len(rivals)] = np.mean(normal, axis=0) if self.gqa == "mean" else np.max(normal, axis=0)
        return scores + 4.0  # which changes no order, and says how near is equal
