"""R-KV, literally: attention of the latest queries and cosines of keys, in NumPy loops, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import softmax
from policies.oracle_recompress import Rounds
from policies.oracle_scoring import pooled

FACTS = {
    "rkv": Facts(
        published={"every": 128, "window": 8, "kernel": 7, "weight": 0.1, "threshold": 0.5, "spare_first": False},
        least={"every": 1, "window": 1, "kernel": 1, "weight": 0, "threshold": -1},
        budgets=(({"window": 8}, 8),),
        golden={"budget": 12, "every": 4, "window": 4},
        tier="slow",
    ),
}


def redundancy(keys: np.ndarray, threshold: float = 0.5, spare_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The mean cosine that each of s keys [s, d] is charged, and the softmax of that over all."""
    s = len(keys)
    lengths = np.linalg.norm(keys, axis=1)
    cosines = keys @ keys.T / (lengths[:, None] * lengths)
    np.fill_diagonal(cosines, 0)
    for i in range(s):
        alike = np.flatnonzero(cosines[i] > threshold)
        if len(alike):
            cosines[i, alike[-1]] = 0
        elif spare_first:
            cosines[i, 0] = 0
    mean = cosines.mean(axis=0)
    return mean, softmax(mean)


def attention(logits: np.ndarray) -> np.ndarray:
    """What w queries of G heads give to tokens, of logits [w, G, n], -inf where they do not look: the largest of the group, softmax, mean."""
    total = np.zeros(logits.shape[-1])
    for query in logits:
        if np.isfinite(query).any():
            total += softmax(query.max(axis=0)) / len(logits)
    return total


class RKV(Rounds):
    """One row; options as those of the policy."""

    window, kernel, weight, threshold, spare_first = 8, 7, 0.1, 0.5, False

    def begin(self) -> None:
        super().begin()
        self.last = self.window

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        scores = np.zeros(len(entries))
        before = entries[: max(len(entries) - self.window, 0)]
        if not before:
            return scores
        observers = range(self.seen - self.window, self.seen)
        keys = self.k_turned[before, head]
        logits = self.q_turned[list(observers)][:, self.queries_of(head)] @ keys.T
        for i, at in enumerate(observers):
            logits[i, :, [place for place, pos in enumerate(before) if pos <= at - self.sliding]] = -np.inf
        important = pooled(attention(logits / np.sqrt(keys.shape[-1])), self.kernel, "max")
        _, redundant = redundancy(self.k_turned[entries, head], self.threshold, self.spare_first)
        scores[: len(before)] = self.weight * important - (1 - self.weight) * redundant[: len(before)]
        return scores


BLOCKS = {
    "rkv": (RKV, {"budget": 16, "every": 5, "window": 4, "kernel": 3}, 4, 2),
    "rkv, each block": (RKV, {"budget": 0.3, "every": 1, "window": 3, "weight": 0.5}, 2, 2),
}
