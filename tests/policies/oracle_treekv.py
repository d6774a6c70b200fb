"""TreeKV, literally: the paper's Algorithm 1 and section 4.2 in NumPy and lists, for one KV head. Written for reading."""

from collections.abc import Callable, Sequence

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares

from kvjax.pallas_kernels.ties import SHARE

FACTS = {
    "treekv": Facts(
        published={"sinks": 4, "keep": "score"},
        least={"sinks": 0, "recent": 0, "block": 1},
        budgets=(({"sinks": 4, "recent": 3}, 8), ({"sinks": 4}, 5)),
        golden={"budget": 12, "sinks": 2, "block": 4},
    ),
}


def next_scope(scope: int, capacity: int, cycle: str) -> int:
    """The scope after an eviction, counted from 1: as the text has it, or as line 16 is printed."""
    return scope % capacity + 1 if cycle == "text" else (scope + 1) % capacity + 1


def above(a: float, b: float) -> bool:
    """Whether a score is higher, and not merely by rounding (float32 sums are compared)."""
    return a - SHARE * abs(a) > b


def trace(
    tokens: int, capacity: int, score: Callable[[int], float], keep: str = "score", cycle: str = "text", scope: int = 1
):
    """Evictions of a stream of `tokens` tokens (numbered from 1) with fixed scores: the evicted, what is left, and the scope."""
    held, evicted = [], []
    for token in range(1, tokens + 1):
        held.append(token)
        if len(held) > capacity:
            left, right = held[scope - 1], held[scope]
            loser = right if keep == "left" or above(score(left), score(right)) else left
            held.remove(loser)
            evicted.append(loser)
            scope = next_scope(scope, capacity, cycle)
    return evicted, held, scope


class TreeHead:
    """One KV head of a TreeKV cache with regions [sinks | tree | recent]; positions are places in the cache."""

    def __init__(self, budget: int, sinks: int, recent: int, keep: str = "score", cycle: str = "text") -> None:
        self.budget, self.sinks, self.keep, self.cycle = budget, sinks, keep, cycle
        self.tree = budget - sinks - recent
        self.entries: list[dict] = []
        self.scope, self.seen = 1, 0

    def step(self, queries: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int) -> np.ndarray:
        """Append a token, attend with the group's queries [G, H], score, evict; the attention output [G, H]."""
        self.entries.append({"k": k, "v": v, "pos": pos, "S": 0.0, "C": 0})
        last = len(self.entries) - 1
        keys = rotate(ROPE, np.stack([e["k"] for e in self.entries]), np.arange(len(self.entries)))
        values = np.stack([e["v"] for e in self.entries]).astype(np.float64)
        probs = shares(rotate(ROPE, queries, last) @ keys.T / np.sqrt(keys.shape[-1]))
        for entry, a in zip(self.entries, probs.mean(axis=0), strict=True):
            entry["S"] += a
            entry["C"] += 1
        if len(self.entries) > self.budget:
            i = self.sinks + self.scope - 1
            left, right = (self.entries[j]["S"] / self.entries[j]["C"] for j in (i, i + 1))
            del self.entries[i + 1 if self.keep == "left" or left > right else i]
            self.scope = next_scope(self.scope, self.tree, self.cycle)
        return probs @ values

    def read_block(
        self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, block: int, size: int
    ) -> np.ndarray:
        """Take in tokens of a text that is read `size` at a time: queries [n, G, H], keys and values [n, H]; outputs [n, G, H]."""
        n, held = len(keys), len(self.entries)
        seen = self.seen
        self.seen += n
        self.entries += [{"k": keys[i], "v": values[i], "pos": seen + i, "S": 0.0, "C": 0} for i in range(n)]
        rotated = rotate(ROPE, np.stack([entry["k"] for entry in self.entries]), np.arange(len(self.entries)))
        stored = np.stack([entry["v"] for entry in self.entries]).astype(np.float64)
        place = held + np.arange(n)[:, None]
        logits = rotate(ROPE, queries, place) @ rotated.T / np.sqrt(keys.shape[-1])
        probs = shares(logits, np.arange(len(self.entries)) <= place[..., None])
        outputs = probs @ stored
        for entry, a in zip(self.entries, probs[-min(block, size) :].mean(axis=1).sum(axis=0), strict=True):
            entry["S"] += a
        for entry in self.entries:
            entry["C"] += min(n, block, size)
        averages = np.array([entry["S"] / entry["C"] for entry in self.entries])
        self.entries = [self.entries[i] for i in self.survivors(averages, len(self.entries), block, size)]
        return outputs

    def prefill(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, block: int) -> None:
        """Take in a prompt: queries [n, G, H], keys and values [n, H]."""
        n = len(keys)
        observed = observation_scores(queries, keys, block)
        observers = min(block, n)
        for pos in self.survivors(observed, n, block):
            entry = {"k": keys[pos], "v": values[pos], "pos": pos, "S": observed[pos] * observers, "C": observers}
            self.entries.append(entry)

    def survivors(self, averages: np.ndarray, n: int, block: int, size: int = 10**9) -> list[int]:
        """Which of n tokens are kept: all if they fit; else sinks, the blocks left in the tree, and recent tokens."""
        if n <= self.budget:
            return list(range(n))
        recent, observers = self.budget - self.sinks - self.tree, min(block, size)
        if size > 1:
            recent = max(recent, min(observers, self.budget - self.sinks))  # the observation block
        tree = self.budget - self.sinks - recent
        block = max(1, min(observers, tree // 4))  # a tree of at least four blocks
        middle = list(range(self.sinks, n - recent))
        first = len(middle) % block or block  # a partial block goes first
        blocks = [middle[:first]] + [middle[i : i + block] for i in range(first, len(middle), block)]
        scores = [np.mean(averages[b]) for b in blocks]
        left, scope = surviving_blocks(scores, tree // block, self.keep, self.cycle, (self.scope - 1) // block + 1)
        self.scope = (scope - 1) * block + 1  # counted in tokens again
        kept = [pos for i in left for pos in blocks[i]]
        return [*range(self.sinks), *kept, *range(n - recent, n)]


def surviving_blocks(
    scores: Sequence[float], capacity: int, keep: str = "score", cycle: str = "text", scope: int = 1
) -> tuple[list[int], int]:
    """Block ids (from 0) left when blocks with these scores have passed one by one through a tree of `capacity` blocks, and the scope."""
    if capacity == 0:
        return [], scope
    _, held, scope = trace(len(scores), capacity, lambda token: scores[token - 1], keep, cycle, scope)
    return [token - 1 for token in held], scope


def observation_scores(queries: np.ndarray, keys: np.ndarray, window: int) -> np.ndarray:
    """Causal attention of the last `window` queries [n, G, H] over keys [n, H], averaged over queries and group."""
    n, _, dim = queries.shape
    rotated = rotate(ROPE, keys, np.arange(len(keys)))
    observers = np.arange(max(0, n - window), n)[:, None]
    logits = rotate(ROPE, queries[observers[:, 0]], observers) @ rotated.T / np.sqrt(dim)
    return shares(logits, np.arange(n) <= observers[..., None]).mean(axis=(0, 1))
