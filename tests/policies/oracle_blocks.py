"""Reading in blocks, literally: one row of a layer in NumPy and lists, float64. Written for reading.

Of each block the queries attend to what is kept and, causally, to the block; then a method's rule chooses from both together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from policies import oracle_cam
from policies.oracle_arrays import ROPE, highest, rotate, shares
from policies.oracle_catekv import chunk_scores
from policies.oracle_chelsea import ChelseaHead
from policies.oracle_clusterkv import ClusterHead
from policies.oracle_scoring import pooled, pyramid
from policies.oracle_treekv import TreeHead

from kvjax.policies.budget import budget_tokens


class Text:
    """A text that is read in blocks of up to `size` tokens: q [T, N, H], k and v [T, K, H]. This one keeps everything.

    Subclasses say in `survivors` what stays; options of theirs, which are class attributes, may be given by name.
    """

    budget: int | float = 10**9
    sliding = 10**9
    """Attention window of the layer in tokens."""

    first, last = 0, 0
    """Entries that are kept whatever their score: the tokens before this position, and the latest so many."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, total: int, size: int, **options: Any) -> None:
        vars(self).update(options)
        self.budget = budget_tokens(self.budget, total)
        self.q, self.k, self.v = (x.astype(np.float64) for x in (q, k, v))
        self.heads, self.size, self.seen = k.shape[1], size, 0
        self.group = q.shape[1] // self.heads
        self.q_turned, self.k_turned = (rotate(ROPE, text, np.arange(len(text))[:, None]) for text in (q, k))
        self.held: list[list[int]] = [[] for _ in range(self.heads)]
        self.begin()

    def begin(self) -> None:
        """What a method has to remember."""

    def read(self, n: int) -> np.ndarray:
        """Read the next n tokens: their outputs [n, N, H]."""
        entries = [[*held, *range(self.seen, self.seen + n)] for held in self.held]
        self.seen += n
        probs = [self.attention(head, entries[head], n) for head in range(self.heads)]
        outputs = [p @ self.v[e, head] for head, (p, e) in enumerate(zip(probs, entries, strict=True))]
        self.held = self.survivors(entries, probs)
        return np.concatenate(outputs, axis=1)

    def attention(self, head: int, entries: list[int], n: int) -> np.ndarray:
        """Causal probabilities that the last n of these entries, as queries of each head of the group, give to all [n, G, M]."""
        keys, queries = self.placed(head, entries, n)
        positions, places = np.asarray(entries), np.arange(len(entries))
        own = places[len(entries) - n :, None]
        visible = (places <= own) & (positions > positions[own] - self.sliding)
        return shares(queries @ keys.T / np.sqrt(keys.shape[-1]), visible[:, None])

    def placed(self, head: int, entries: list[int], n: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of entries [M, H] and the last n queries [n, G, H], at their positions in the text."""
        return self.k_turned[entries, head], self.q_turned[self.seen - n : self.seen, self.queries_of(head)]

    def queries_of(self, head: int) -> list[int]:
        """Query heads that read this KV head."""
        return list(range(head * self.group, (head + 1) * self.group))

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        """Which entries stay, by head, given what the block's queries attend to."""
        return entries

    def best(self, entries: list[int], scores: Sequence[float]) -> list[int]:
        """All entries if they are within the budget; else both ends, and between them those that score highest."""
        if len(entries) <= self.budget:
            return entries
        ends = {i for i, pos in enumerate(entries) if pos < self.first or i >= len(entries) - self.last}
        between = set(range(len(entries))) - ends
        chosen = highest(scores, between, self.budget - self.first - self.last)
        return [entries[i] for i in sorted(ends.union(chosen))]

    def kept(self) -> list[set[int]]:
        """Positions that each head holds."""
        return [set(held) for held in self.held]


class Streaming(Text):
    """Sinks and the latest; at their places among kept and block, or at original positions."""

    sinks, by_place = 4, True

    def placed(self, head: int, entries: list[int], n: int) -> tuple[np.ndarray, np.ndarray]:
        if not self.by_place:
            return super().placed(head, entries, n)
        places = np.arange(len(entries))
        queries = self.q[entries[len(entries) - n :]][:, self.queries_of(head)]
        return rotate(ROPE, self.k[entries, head], places), rotate(ROPE, queries, places[len(entries) - n :, None])

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        recent = self.budget - self.sinks
        return [e if len(e) <= self.budget else e[: self.sinks] + e[len(e) - recent :] for e in entries]


class SnapKV(Text):
    """Attention from the block's last queries, pooled over neighbours among the entries."""

    window, pool, kernel = 4, "max", 7

    def begin(self) -> None:
        self.last = self.window

    def scores(self, probs: np.ndarray) -> np.ndarray:
        """Of every entry, from probabilities [n, G, M]."""
        observed = probs[-self.window :].mean(axis=(0, 1))
        observed[len(observed) - min(self.window, len(observed)) :] = 0
        return observed if self.pool is None else pooled(observed, self.kernel, self.pool)

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.best(e, self.scores(p)) for e, p in zip(entries, probs, strict=True)]


class PyramidKV(SnapKV):
    """SnapKV with a layer's budget by the tokens seen so far."""

    beta, layer, num_layers = 20, 0, 2

    def begin(self) -> None:
        super().begin()
        self.average = self.budget

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        self.budget = pyramid(self.average, self.seen, self.window, self.beta, self.num_layers)[self.layer]
        return super().survivors(entries, probs)


class AdaKV(SnapKV):
    """SnapKV, where the heads of a layer share their budgets."""

    alpha = 0.2

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        if sum(map(len, entries)) <= self.budget * self.heads:
            return entries
        scores = [self.scores(p) for p in probs]
        between = [len(e) - self.window for e in entries]
        flat = {
            (head, place): scores[head][place] for head in range(self.heads) for place in range(max(between[head], 0))
        }
        numbers = dict(enumerate(flat.values()))
        share = self.budget - self.window
        winners = [list(flat)[i][0] for i in highest(numbers, numbers, share * self.heads)]
        kept = []
        for head, e in enumerate(entries):
            given = math.floor(round((1 - self.alpha) * winners.count(head) + self.alpha * share, 6))
            chosen = highest(scores[head], range(between[head]), given)
            kept.append([e[i] for i in sorted(chosen)] + e[max(between[head], 0) :])
        return kept


class ChunkKV(Text):
    """Whole chunks of the text, with those of their members that are left, by attention from the block's last queries."""

    chunk, window, score, agg, pool, shared_heads = 10, 4, "softmax", "sum", None, False

    def token_scores(self, head: int, entries: list[int], probs: np.ndarray) -> np.ndarray:
        """Of the entries before the window."""
        if self.score == "raw":
            keys, queries = self.placed(head, entries, len(probs))
            probs = np.einsum("ngh,mh->ngm", queries, keys)
        observed = probs[-self.window :].mean(axis=(0, 1))[: max(len(entries) - self.window, 0)]
        return observed if self.pool is None else pooled(observed, self.pool, "avg")

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        scores = [self.token_scores(head, e, p) for head, (e, p) in enumerate(zip(entries, probs, strict=True))]
        if self.shared_heads:
            scores = [np.sum(scores, axis=0)] * self.heads
        return [self.chosen(e, s) for e, s in zip(entries, scores, strict=True)]

    def chosen(self, entries: list[int], scores: np.ndarray) -> list[int]:
        """The entries of one head that stay."""
        if len(entries) <= max(self.budget, self.window):
            return entries
        members: dict[int, list[float]] = {}
        for pos, score in zip(entries, scores, strict=False):
            members.setdefault(pos // self.chunk, []).append(score)
        totals = {number: np.sum(of) if self.agg == "sum" else np.mean(of) for number, of in members.items()}
        best = highest(totals, totals, (self.budget - self.window) // self.chunk)
        before = [pos for pos in entries[: len(scores)] if pos // self.chunk in best]
        return before + entries[len(scores) :]


class CateKV(Text):
    """Heads of one kind: [sinks | middle, in chunks | unaligned tail | recent]."""

    kind, sinks, recent, chunk, window, order, eta = "consistent", 2, 4, 4, 6, "max_then_sum", 1.0

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.chosen(head, e, len(p)) for head, (e, p) in enumerate(zip(entries, probs, strict=True))]

    def chosen(self, head: int, entries: list[int], n: int) -> list[int]:
        """The entries of one head that stay."""
        if self.seen <= self.budget:
            return entries
        matrix = self.observed(head, entries, n)
        scores = chunk_scores(matrix, self.chunk, self.order)
        tail = matrix.shape[1] - len(scores) * self.chunk
        if self.kind == "consistent":
            count = (self.budget - self.sinks - self.recent - tail) // self.chunk
        else:
            count = math.floor(self.eta * ((self.seen - self.sinks - self.recent) // self.chunk))
        best = sorted(highest(scores, range(len(scores)), count))
        middle = [entries[self.sinks + i * self.chunk + j] for i in best for j in range(self.chunk)]
        return entries[: self.sinks] + middle + entries[len(entries) - self.recent - tail :]

    def observed(self, head: int, entries: list[int], n: int) -> np.ndarray:
        """What the block's last queries attend to among the middle's entries alone, mean over the group."""
        keys, queries = self.placed(head, entries, n)
        middle = list(range(self.sinks, len(entries) - self.recent))
        observers = list(range(n))[-self.window :]
        own, positions = len(entries) - n + np.asarray(observers)[:, None], np.asarray(entries)
        visible = (np.asarray(middle) <= own) & (positions[middle] > positions[own] - self.sliding)
        logits = queries[observers] @ keys[middle].T / np.sqrt(keys.shape[-1])
        return shares(logits, visible[:, None]).mean(axis=1)


class ExpectedAttention(Text):
    """Scores for future queries, by mean and covariance of all queries so far behind the sinks."""

    sinks, future, epsilon = 2, 8, 0.02

    def begin(self) -> None:
        self.first = self.sinks

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.best(e, self.scores(head, e)) for head, e in enumerate(entries)]

    def scores(self, head: int, entries: list[int]) -> np.ndarray:
        """Of every entry; of sinks 0."""
        behind = [i for i, pos in enumerate(entries) if pos >= self.sinks]
        scores = np.zeros(len(entries))
        if not behind:
            return scores
        dim = self.q.shape[-1]
        turns = [rotate(ROPE, np.eye(dim), self.seen + i).T for i in range(self.future)]
        turn = np.mean(turns, axis=0)
        keys = self.k_turned[[entries[i] for i in behind], head]
        for n in self.queries_of(head):
            queries = self.q[self.sinks : self.seen, n]
            mean, covariance = turn @ queries.mean(axis=0), turn @ np.cov(queries.T, bias=True) @ turn.T
            logits = keys @ mean / np.sqrt(dim) + ((keys @ covariance) * keys).sum(axis=1) / dim / 2
            scores[behind] += shares(logits) / self.group
        values = np.linalg.norm(self.v[[entries[i] for i in behind], head], axis=-1)
        scores[behind] = (scores[behind] + self.epsilon) * values
        return scores


class H2O(Text):
    """Attention from all queries so far, or of each block's last ones; the latest stay whatever theirs is."""

    recent: int | None = None
    observers = 10**9

    def begin(self) -> None:
        self.last = self.budget // 2 if self.recent is None else self.recent
        self.score: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        kept = []
        for head, (e, p) in enumerate(zip(entries, probs, strict=True)):
            mass = p[-self.observers :].mean(axis=1).sum(axis=0)
            scores = [self.score[head].get(pos, 0.0) + more for pos, more in zip(e, mass, strict=True)]
            kept.append(self.best(e, scores))
            self.score[head] = {pos: score for pos, score in zip(e, scores, strict=True) if pos in kept[-1]}
        return kept


class TOVA(Text):
    """Attention from the block's last query, mean over all heads."""

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        scores = np.mean([p[-1].mean(axis=0) for p in probs], axis=0)
        return [self.best(e, scores) for e in entries]


class KeyDiff(Text):
    """Keys unlike the mean of all entries' stay."""

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.best(e, self.difference(self.k_turned[e, head])) for head, e in enumerate(entries)]

    def difference(self, keys: np.ndarray) -> np.ndarray:
        """2 less the cosine of each key with the mean of the normalised ones."""
        units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = units.mean(axis=0)
        return 2 - units @ anchor / np.linalg.norm(anchor)


class KNorm(Text):
    """Small keys stay."""

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.best(e, -np.linalg.norm(self.k[e, head], axis=-1)) for head, e in enumerate(entries)]


class Random(Text):
    """Those that drew the highest numbers stay: `drawn` [K, S]."""

    drawn: np.ndarray

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        return [self.best(e, self.drawn[head, e]) for head, e in enumerate(entries)]


class CaM(Text):
    """Token by token, as in decoding."""

    sinks, merge = 4, 16
    drawn: np.ndarray

    def begin(self) -> None:
        self.row = oracle_cam.CaM(self.q, self.k, self.v, 0, self.budget)
        vars(self.row).update(sinks=self.sinks, merge=self.merge, drawn=self.drawn)
        self.row.prefill()

    def read(self, n: int) -> np.ndarray:
        outputs = []
        for pos in range(self.seen, self.seen + n):
            outputs.append(self.row.step(pos))
            self.row.evict()
        self.seen += n
        return np.stack(outputs)

    def kept(self) -> list[set[int]]:
        return self.row.kept()


class TreeKV(Text):
    """The tree, into which a block's tokens pass."""

    sinks, block, keep, cycle = 4, 32, "score", "text"
    recent: int | None = None

    def begin(self) -> None:
        recent = self.budget // 2 - self.sinks if self.recent is None else self.recent
        self.trees = [TreeHead(self.budget, self.sinks, recent, self.keep, self.cycle) for _ in range(self.heads)]

    def read(self, n: int) -> np.ndarray:
        new = slice(self.seen, self.seen + n)
        self.seen += n
        outputs = [
            tree.read_block(
                self.q[new, self.queries_of(head)], self.k[new, head], self.v[new, head], self.block, self.size
            )
            for head, tree in enumerate(self.trees)
        ]
        return np.concatenate(outputs, axis=1)

    def kept(self) -> list[set[int]]:
        return [{entry["pos"] for entry in tree.entries} for tree in self.trees]


class Clustering(ChelseaHead):
    """One KV head of a Chelsea cache that is read in blocks."""

    def read(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
        """Append tokens, attend with the group's queries [n, G, H], cluster if it is time: outputs [n, G, H]."""
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            self._append(k, v, first + i)
        k, v, n, pos = (np.stack([e[name] for e in self.entries]) for name in ("k", "v", "n", "pos"))
        at = first + np.arange(len(queries))[:, None]
        logits = rotate(ROPE, queries, at) @ k.T / np.sqrt(k.shape[-1]) + np.log(n)
        self._compress()
        return shares(logits, pos <= at[..., None]) @ v


class Chelsea(Text):
    """Clusters, once a row is full after a block."""

    sinks, recent, every, r_min = 16, 64, 64, 0.05
    chunk: int | None = 256
    schedule = (0.4, 0.1, 4)

    def begin(self) -> None:
        budget = max(self.budget, 1)
        self.clusterings = [
            Clustering(budget, self.sinks, self.recent, self.chunk, self.every, self.schedule, self.r_min)
            for _ in range(self.heads)
        ]

    def read(self, n: int) -> np.ndarray:
        new = slice(self.seen, self.seen + n)
        outputs = [
            head.read(self.q[new, self.queries_of(i)], self.k[new, i], self.v[new, i], self.seen)
            for i, head in enumerate(self.clusterings)
        ]
        self.seen += n
        return np.concatenate(outputs, axis=1)

    def kept(self) -> list[set[int]]:
        return [{entry["pos"] for entry in head.entries} for head in self.clusterings]


class ClusterKV(Text):
    """Everything is kept; each block is grouped into clusters of its own, with the tokens that have waited for it."""

    policy: Any
    order: Callable[[int, list[int]], np.ndarray]
    """Of a head: the order in which k-means takes some positions for its first centroids."""

    def begin(self) -> None:
        self.stores = [
            ClusterHead(self.policy, lambda positions, head=head: self.order(head, positions))
            for head in range(self.heads)
        ]

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        for head, store in enumerate(self.stores):
            for pos in range(len(store.keys), self.seen):
                store.add(self.k[pos, head], self.v[pos, head])
            per, tail = self.policy.tokens_per_cluster, len(store.tail)
            count = tail // per if store.clusters else max(self.seen // per, 1)
            if min(count, tail) > 0:
                store.group(min(count, tail))
        return entries


class ByHead:
    """Groups of heads, each read in its own way."""

    def __init__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, total: int, size: int, parts: dict[tuple[int, ...], Any]
    ) -> None:
        self.shape, self.group = q.shape[1:], q.shape[1] // k.shape[1]
        self.parts = {}
        for heads, make in parts.items():
            at = list(heads)
            self.parts[heads] = make(q[:, self.queries_of(heads)], k[:, at], v[:, at], total, size)

    def queries_of(self, heads: Sequence[int]) -> list[int]:
        """Query heads that read these KV heads."""
        return [head * self.group + g for head in heads for g in range(self.group)]

    def read(self, n: int) -> np.ndarray:
        """See `Text.read`."""
        outputs = np.zeros((n, *self.shape))
        for heads, part in self.parts.items():
            outputs[:, self.queries_of(heads)] = part.read(n)
        return outputs

    def kept(self) -> list[set[int]]:
        """Positions that each head holds."""
        held = {head: kept for heads, part in self.parts.items() for head, kept in zip(heads, part.kept(), strict=True)}
        return [held[head] for head in sorted(held)]
