"""Quest, literally: Algorithm 1 of the paper in NumPy and loops, for one KV head. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, highest, rotate, softmax

FACTS = {
    "quest": Facts(
        published={"page": 16, "dense_layers": 2, "recent": 0, "gqa": "query_head"},
        least={"page": 1, "dense_layers": 0, "recent": 0},
        budgets=(({"page": 16}, 16), ({"page": 16, "recent": 1}, 32)),
        small={"page": 4},
        golden={"budget": 12, "page": 4, "dense_layers": 1},
        tier="slow",
    ),
}


def bound(query: np.ndarray, keys: np.ndarray) -> float:
    """The most that a query [H] can have as product with anything between the least and greatest of keys [n, H]."""
    return np.maximum(query * keys.min(axis=0), query * keys.max(axis=0)).sum()


class QuestHead:
    """One KV head: all its keys and values."""

    def __init__(self, budget: int, page: int, recent: int = 0, gqa: str = "query_head") -> None:
        self.budget, self.page, self.recent, self.gqa = budget, page, recent, gqa
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """One more token."""
        self.keys.append(rotate(ROPE, k, len(self.keys)))
        self.values.append(v.astype(np.float64))

    def bounds(self, query: np.ndarray) -> list[float]:
        """Of every page, the bound for a rotated query."""
        return [bound(query, np.stack(self.keys[i : i + self.page])) for i in range(0, len(self.keys), self.page)]

    def chosen(self, scores: np.ndarray) -> list[int]:
        """Tokens that are read, given a score for each page."""
        n = len(self.keys)
        always = [i for i in range(len(scores)) if self.recent and (i + 1) * self.page > n - self.recent]
        most = (
            -(-(self.recent + self.page - 1) // self.page) if self.recent else 0
        )  # pages that `recent` tokens can lie in
        others = highest(scores, set(range(len(scores))) - set(always), self.budget // self.page - most)
        pages = [*others, *always]
        return [t for i in pages for t in range(i * self.page, min((i + 1) * self.page, n))]

    def attend(self, queries: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """What a group's queries [G, H] at the last position get [G, H], and the tokens that each reads."""
        turned = rotate(ROPE, queries, len(self.keys) - 1)
        scores = np.asarray([self.bounds(q) for q in turned])
        if self.gqa != "query_head":
            scores = np.broadcast_to(scores.sum(axis=0) if self.gqa == "sum" else scores.max(axis=0), scores.shape)
        reads = [self.chosen(row) for row in scores]
        outputs = [
            softmax(np.stack([self.keys[t] for t in read]) @ q / np.sqrt(len(q)))
            @ np.stack([self.values[t] for t in read])
            for q, read in zip(turned, reads, strict=True)
        ]
        return np.stack(outputs), reads
