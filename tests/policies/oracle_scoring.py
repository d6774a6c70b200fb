"""Policies that score tokens, literally: one row in NumPy and lists, float64. Written for reading."""

from collections.abc import Sequence

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, highest, rotate, shares, softmax

from kvjax.pallas_kernels.ties import SHARE

FACTS = {
    "adakv": Facts(
        published={"window": 32, "pool": "max", "kernel": 7, "alpha": 0.2},
        least={"alpha": 0, "window": 1, "kernel": 1},
        golden={"budget": 12, "window": 4},
        tier="slow",
    ),
    "expected_attention": Facts(
        published={"sinks": 4, "future": 512, "epsilon": 0.02},
        least={"sinks": 0, "future": 1, "epsilon": 0},
        bounds=("future",),
        golden={"budget": 12, "sinks": 2, "future": 16},
        tier="slow",
    ),
    "h2o": Facts(
        published={"recent": None, "observers": "all"},
        least={"recent": 0, "window": 1},
        budgets=(({"recent": 3}, 4), ({}, 1)),
        golden={"budget": 12},
        tier="slow",
    ),
    "keydiff": Facts(golden={"budget": 12}, tier="slow"),
    "knorm": Facts(
        published={"dense_layers": 2},
        least={"dense_layers": 0},
        golden={"budget": 12, "dense_layers": 1},
        tier="slow",
    ),
    "pyramidkv": Facts(
        published={"window": 32, "pool": "max", "kernel": 7, "beta": 20},
        least={"beta": 1, "window": 1, "kernel": 1},
        golden={"budget": 12, "window": 4, "beta": 4},
        tier="slow",
    ),
    "random": Facts(golden={"budget": 12}, tier="slow"),
    "snapkv": Facts(
        published={"window": 32, "pool": "max", "kernel": 7},
        least={"window": 1, "kernel": 1},
        budgets=(({"window": 32}, 32),),
        golden={"budget": 12, "window": 4},
        tier="slow",
    ),
    "streaming_llm": Facts(
        published={"sinks": 4},
        least={"sinks": 0},
        budgets=(({"sinks": 4}, 5),),
        golden={"budget": 12, "sinks": 2},
    ),
    "tova": Facts(published={"keep_newest": False}, golden={"budget": 12}, tier="slow"),
}


class Row:
    """One row of a layer: q [S, N, H], k and v [S, K, H], of which the first `length` are the prompt.

    Subclasses say how a method scores: `prompt_scores`, and while decoding `arrival`, `attended` and `ranking`.
    """

    first, last = 0, 0
    """Tokens that are kept whatever their score: the first so many, and the latest."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, budget: int) -> None:
        self.q, self.k, self.v, self.length, self.budget = q, k, v.astype(np.float64), length, budget
        self.heads = k.shape[1]
        self.group = q.shape[1] // self.heads
        self.turned = rotate(ROPE, k, np.arange(len(k))[:, None])
        self.asking = rotate(ROPE, q, np.arange(len(q))[:, None])
        self.held: list[dict[int, float]] = []

    def prompt_scores(self, head: int) -> np.ndarray:
        """Scores of the prompt's tokens in one head."""
        raise NotImplementedError

    def arrival(self, head: int, pos: int) -> float:
        """A new token's score."""
        return 0.0

    def attended(self, head: int, probs: Sequence[dict[int, float]]) -> None:
        """Scores of what a head holds, after each head has given its tokens these probabilities."""

    def ranking(self, head: int) -> dict[int, float]:
        """By what the next token to go is found."""
        return self.held[head]

    def prefill(self) -> list[set[int]]:
        """Positions that each head keeps of the prompt."""
        for head in range(self.heads):
            scores = self.prompt_scores(head)
            self.held.append({pos: scores[pos] for pos in self.survivors(scores)})
        return self.kept()

    def survivors(self, scores: np.ndarray) -> list[int]:
        """The best of a prompt beside its two ends; all of it where it fits."""
        if self.length <= self.budget:
            return list(range(self.length))
        between = range(self.first, self.length - self.last)
        best = highest(scores, between, self.budget - self.first - self.last)
        return sorted([*range(self.first), *best, *range(self.length - self.last, self.length)])

    def step(self, pos: int) -> np.ndarray:
        """Append the token at `pos` and attend: the output [N, H]."""
        outputs, probs = [], []
        for head in range(self.heads):
            self.held[head][pos] = self.arrival(head, pos)
            positions = list(self.held[head])
            shares = np.stack([self.attention(n, pos, positions) for n in self.queries_of(head)])
            outputs.append(shares @ self.v[positions, head])
            probs.append(dict(zip(positions, shares.mean(axis=0), strict=True)))
        for head in range(self.heads):
            self.attended(head, probs)
        return np.concatenate(outputs)

    def evict(self) -> None:
        """One token goes from each head that holds more than its budget; of equal ones the latest."""
        for head, held in enumerate(self.held):
            if len(held) > self.budget:
                newest, ranking = max(held), self.ranking(head)
                candidates = [pos for pos in held if self.first <= pos <= newest - self.last]
                lowest = min(ranking[pos] for pos in candidates)
                del held[max(pos for pos in candidates if ranking[pos] - SHARE * abs(ranking[pos]) <= lowest)]

    def attention(self, n: int, pos: int, positions: Sequence[int]) -> np.ndarray:
        """Probabilities that query head n at `pos` gives to tokens at these positions."""
        query = self.asking[pos, n]
        return softmax(self.turned[list(positions), n // self.group] @ query / np.sqrt(len(query)))

    def queries_of(self, head: int) -> range:
        """Query heads that read this KV head."""
        return range(head * self.group, (head + 1) * self.group)

    def mass(self, head: int, observers: int) -> np.ndarray:
        """Attention that each token of the prompt gets from the last `observers` queries, mean over the group."""
        at = np.arange(max(0, self.length - observers), self.length)
        queries = self.asking[at][:, list(self.queries_of(head))]
        logits = queries @ self.turned[: self.length, head].T / np.sqrt(queries.shape[-1])
        visible = np.arange(self.length) <= at[:, None, None]
        return shares(logits, visible).mean(axis=1).sum(axis=0)

    def kept(self) -> list[set[int]]:
        """Positions that each head holds."""
        return [set(held) for held in self.held]


def pooled(scores: np.ndarray, width: int, kind: str) -> np.ndarray:
    """Average (zeros beyond the ends count) or maximum over `width` neighbours."""
    half = width // 2
    padded = np.concatenate([np.zeros(half), scores, np.zeros(half)])
    if not len(scores):
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)[: len(scores)]
    return windows.mean(axis=1) if kind == "avg" else windows.max(axis=1)


class SnapKV(Row):
    """Attention from the last tokens, pooled; only the prompt is compressed."""

    window, pool, kernel = 4, "max", 7

    def prefill(self) -> list[set[int]]:
        self.last = self.window
        return super().prefill()

    def prompt_scores(self, head: int) -> np.ndarray:
        before = max(self.length - self.window, 0)
        observed = self.mass(head, self.window)[:before]
        if self.pool is not None:
            observed = pooled(observed, self.kernel, self.pool)
        return np.concatenate([observed, np.zeros(self.length - before)])

    def evict(self) -> None:
        pass


def pyramid(budget: int, length: int, window: int, beta: int, num_layers: int) -> list[int]:
    """Slots that each layer keeps of a prompt, as published."""
    if length <= budget:
        return [length] * num_layers
    if length < 2 * (budget - window):
        return [budget] * num_layers
    low = (budget - window) // beta
    high = 2 * (budget - window) - low
    if high >= length - window:
        high = length - window
        low = 2 * (budget - window) - high
    step = (high - low) // (num_layers - 1)
    return [high - layer * step + window for layer in range(num_layers)]


class H2O(Row):
    """Attention from all queries so far."""

    observers = 10**9

    def prefill(self) -> list[set[int]]:
        self.last = self.recent if self.recent is not None else self.budget // 2
        return super().prefill()

    recent: int | None = None

    def prompt_scores(self, head: int) -> np.ndarray:
        return self.mass(head, self.observers)

    def attended(self, head: int, probs: Sequence[dict[int, float]]) -> None:
        for pos, share in probs[head].items():
            self.held[head][pos] += share


class TOVA(Row):
    """Attention from the latest query, mean over all heads."""

    def prompt_scores(self, head: int) -> np.ndarray:
        return np.mean([self.mass(other, 1) for other in range(self.heads)], axis=0)

    def attended(self, head: int, probs: Sequence[dict[int, float]]) -> None:
        for pos in self.held[head]:
            self.held[head][pos] = float(np.mean([shares[pos] for shares in probs]))


class KNorm(Row):
    """Small keys stay."""

    def prompt_scores(self, head: int) -> np.ndarray:
        return np.asarray([self.arrival(head, pos) for pos in range(self.length)])

    def arrival(self, head: int, pos: int) -> float:
        return -float(np.sqrt(np.sum(self.k[pos, head].astype(np.float64) ** 2)))


class KeyDiff(Row):
    """Keys unlike the average stay; the average is over what there is at the time."""

    def prompt_scores(self, head: int) -> np.ndarray:
        return self.difference(head, range(self.length))

    def ranking(self, head: int) -> dict[int, float]:
        return dict(zip(self.held[head], self.difference(head, self.held[head]), strict=True))

    def difference(self, head: int, positions: Sequence[int] | dict[int, float]) -> np.ndarray:
        """2 less the cosine of each key with the mean of the normalised ones."""
        keys = self.turned[list(positions), head]
        units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = units.mean(axis=0)
        return 2 - units @ anchor / np.linalg.norm(anchor)


class Random(Row):
    """Those that drew the highest numbers stay: `drawn` [K, S]."""

    drawn: np.ndarray

    def prompt_scores(self, head: int) -> np.ndarray:
        return self.drawn[head]

    def arrival(self, head: int, pos: int) -> float:
        return self.drawn[head, pos]


class ExpectedAttention(Row):
    """The expectation of exp(q · k / √d) for normal queries, rotated by the average of the rotations to come."""

    sinks, future, epsilon = 2, 8, 0.02

    def prefill(self) -> list[set[int]]:
        self.first = self.sinks
        return super().prefill()

    def prompt_scores(self, head: int) -> np.ndarray:
        if self.length <= self.sinks:
            return np.zeros(self.length)
        dim = self.q.shape[-1]
        axes = np.eye(dim)
        turns = [rotate(ROPE, axes, self.length + i).T for i in range(self.future)]
        turn = np.mean(turns, axis=0)
        keys = self.turned[self.sinks : self.length, head]
        expected = np.zeros(len(keys))
        for n in self.queries_of(head):
            queries = self.q[self.sinks : self.length, n].astype(np.float64)
            mean = turn @ queries.mean(axis=0)
            covariance = turn @ np.cov(queries.T, bias=True) @ turn.T
            logits = keys @ mean / np.sqrt(dim) + ((keys @ covariance) * keys).sum(axis=1) / dim / 2
            expected += shares(logits) / self.group
        values = np.linalg.norm(self.v[self.sinks : self.length, head], axis=-1)
        return np.concatenate([np.zeros(self.sinks), (expected + self.epsilon) * values])

    def evict(self) -> None:
        pass
