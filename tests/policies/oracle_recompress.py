"""Rounds of compression while decoding, literally: one row of a layer in NumPy and lists, float64. Written for reading."""

import numpy as np
from policies.oracle_arrays import shares
from policies.oracle_blocks import Text
from policies.oracle_scoring import pooled


class Rounds(Text):
    """A prompt is `read`, and then each new token: once `every` tokens have come since the last round, there is one.

    Subclasses say in `scored` what each head's entries are worth, by the last `window` queries of the text, whenever these came.
    """

    every, window, keeps_prompt = 4, 4, False

    def begin(self) -> None:
        self.rounded = 0
        self.lengths: list[int] = []

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        self.lengths.append(max(map(len, entries)))
        if self.keeps_prompt and not self.rounded:
            self.rounded = self.seen
        if self.seen - self.rounded < self.every:
            return entries
        self.rounded = self.seen
        return self.round(entries)

    def round(self, entries: list[list[int]]) -> list[list[int]]:
        """What is left of each head's entries."""
        return [self.best(e, self.scored(head, e)) for head, e in enumerate(entries)]

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        """What each of a head's entries is worth."""
        raise NotImplementedError

    def looks(self, head: int, entries: list[int]) -> np.ndarray:
        """Causal probabilities that the last queries, rotated where they stood, give to entries [w, G, M]."""
        at, positions = np.arange(max(self.seen - self.window, 0), self.seen)[:, None], np.asarray(entries)
        keys, queries = self.k_turned[entries, head], self.q_turned[at[:, 0]][:, self.queries_of(head)]
        visible = (at - self.sliding < positions) & (positions <= at)
        return shares(queries @ keys.T / np.sqrt(keys.shape[-1]), visible[:, None])


class SnapKV(Rounds):
    """Attention from the latest queries, pooled over neighbours that are left."""

    pool, kernel = "max", 7

    def begin(self) -> None:
        super().begin()
        self.last = self.window

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        observed = self.looks(head, entries).mean(axis=(0, 1))
        observed[len(observed) - self.window :] = 0
        return observed if self.pool is None else pooled(observed, self.kernel, self.pool)


class TOVA(Rounds):
    """Attention from the latest query, mean over all heads."""

    window = 1

    def round(self, entries: list[list[int]]) -> list[list[int]]:
        scores = np.mean([self.looks(head, e)[0].mean(axis=0) for head, e in enumerate(entries)], axis=0)
        return [self.best(e, scores) for e in entries]


class KNorm(Rounds):
    """Small keys stay."""

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        return -np.linalg.norm(self.k[entries, head], axis=-1)


class H2O(Rounds):
    """The latest queries' attention in all."""

    def begin(self) -> None:
        super().begin()
        self.last = self.budget // 2

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        return self.looks(head, entries).mean(axis=1).sum(axis=0)
