"""CateKV, literally: equations 1 to 5 and Algorithm 1 of the paper in NumPy and lists. Written for reading."""

import math
from collections.abc import Sequence

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares

FACTS = {
    "catekv": Facts(
        published={"eta": 1.0, "chunk": 8, "window": 64, "budget": 2048},
        least={"sinks": 0, "recent": 0, "chunk": 1, "window": 1, "eta": 0},
        golden={"budget": 16, "eta": 0.5, "sinks": 2, "recent": 4, "chunk": 4, "window": 4},
    ),
}


def observation_matrix(queries: np.ndarray, keys: np.ndarray, sinks: int, recent: int, window: int) -> np.ndarray:
    """Equation 1, averaged over the group: queries [n, G, H] and keys [n, H] of one KV head; [L_obs, n - sinks - recent]."""
    n, _, dim = queries.shape
    middle = np.arange(sinks, n - recent)
    observers = np.arange(max(0, n - window), n)[:, None]
    turned, asking = rotate(ROPE, keys[middle], middle), rotate(ROPE, queries[observers[:, 0]], observers)
    return shares(asking @ turned.T / np.sqrt(dim), middle <= observers[..., None]).mean(axis=1)


def chunk_scores(matrix: np.ndarray, chunk: int, order: str) -> list[float]:
    """One score for each whole chunk of columns."""
    blocks = [matrix[:, i : i + chunk] for i in range(0, matrix.shape[1] - chunk + 1, chunk)]
    if order == "max_then_sum":
        return [float(block.max(axis=1).sum()) for block in blocks]
    return [float(block.sum(axis=0).max()) for block in blocks]


def best(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` largest, of equal ones the first; ascending."""
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[: max(count, 0)])


class CateHead:
    """One KV head's cache."""

    def __init__(self, kind: str, budget: int, sinks: int, recent: int, chunk: int, window: int, eta=1.0, order=""):
        self.kind, self.budget, self.eta, self.order = kind, budget, eta, order or "max_then_sum"
        self.sinks, self.recent, self.chunk, self.window = sinks, recent, chunk, window
        self.held: list[int] = []
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}

    def prefill(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in a prompt: queries [n, G, H], keys and values [n, H]."""
        for pos in self.chosen(queries, keys):
            self.append(keys[pos], values[pos], pos)

    def chosen(self, queries: np.ndarray, keys: np.ndarray) -> list[int]:
        """Which prompt tokens are kept."""
        n = len(keys)
        if n <= self.budget:
            return list(range(n))
        matrix = observation_matrix(queries, keys, self.sinks, self.recent, self.window)
        scores = chunk_scores(matrix, self.chunk, self.order)
        tail = matrix.shape[1] - len(scores) * self.chunk
        if self.kind == "consistent":
            count = (self.budget - self.sinks - self.recent - tail) // self.chunk
        else:
            count = math.floor(self.eta * len(scores))
        middle = [self.sinks + i * self.chunk + j for i in best(scores, count) for j in range(self.chunk)]
        return [*range(self.sinks), *middle, *range(n - self.recent - tail, n)]

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """Keep one more token."""
        self.held.append(pos)
        self.keys[pos], self.values[pos] = rotate(ROPE, k, pos), v.astype(np.float64)

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H] over all that is held."""
        keys, values = np.stack(list(self.keys.values())), np.stack(list(self.values.values()))
        return shares(rotate(ROPE, queries, pos) @ keys.T / np.sqrt(keys.shape[-1])) @ values


def frequencies(matrix: np.ndarray, k: float, alpha: float) -> np.ndarray:
    """Equations 2 and 3: how many observers find each token critical."""
    threshold = alpha * np.quantile(matrix, k)
    return (matrix >= threshold).sum(axis=0)


def variation(counts: Sequence[float]) -> float:
    """Equation 4: standard deviation (of the population) over mean."""
    mean = sum(counts) / len(counts)
    return math.sqrt(sum((c - mean) ** 2 for c in counts) / len(counts)) / mean


def code_score(matrix: np.ndarray, k: float, alpha: float, chunk: int) -> float:
    """The score of the published code: two quantiles, any token of a chunk, the sample's standard deviation."""
    low, high = np.quantile(matrix, 1 - k), np.quantile(matrix, k)
    critical = matrix > max(low + (high - low) * alpha, 1e-9)
    chunks = [critical[:, i : i + chunk].any(axis=1).sum() for i in range(0, matrix.shape[1] - chunk + 1, chunk)]
    return float(np.std(chunks, ddof=1) / (np.mean(chunks) or 1e-10))


def adaptive_heads(samples: Sequence[np.ndarray], r: float) -> set[tuple[int, ...]]:
    """Equation 5 for every sample, then the vote: the r·L·K heads that are most often adaptive."""
    votes = np.zeros(samples[0].shape, int)
    for scores in samples:
        votes += scores <= np.quantile(scores, r)
    heads = list(np.ndindex(votes.shape))
    count = math.ceil(round(r * len(heads), 6))
    return set(sorted(heads, key=lambda head: -votes[head])[:count])
