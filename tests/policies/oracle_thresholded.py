"""A threshold for scores of single tokens, literally: one row of a layer in NumPy and lists, float64. Written for reading."""

import numpy as np
from policies.oracle_blocks import Text


class Thresholded(Text):
    """A token that is not among the latest `window` goes if it scores below the threshold; then the lowest ones beyond the budget."""

    threshold, window = 0.0, 4

    def begin(self) -> None:
        self.last = self.window

    def survivors(self, entries: list[list[int]], probs: list[np.ndarray]) -> list[list[int]]:
        kept = []
        for head, held in enumerate(entries):
            scores = {pos: self.score(head, pos) for pos in held}
            enough = [pos for pos in held if pos >= self.seen - self.window or scores[pos] >= self.threshold]
            kept.append(self.best(enough, [scores[pos] for pos in enough]))
        return kept

    def score(self, head: int, pos: int) -> float:
        """What a token scores, whatever is around it."""
        raise NotImplementedError


class KNorm(Thresholded):
    """Small keys stay."""

    def score(self, head: int, pos: int) -> float:
        return -float(np.linalg.norm(self.k[pos, head]))


class Told(Thresholded):
    """Those that score enough by a table stay: `table` [K, S]."""

    table: np.ndarray

    def score(self, head: int, pos: int) -> float:
        return float(self.table[head, pos])


def masked(scores: np.ndarray, prompt: int, window: int, threshold: float) -> list[set[int]]:
    """What kvpress 0.5.5's DMSPress masks of one KV head after the prompt and each new token, by scores [S].

    As its code has it: a buffer of scores, from which all beyond the latest `window` leave.
    """
    gone, found, buffer = set[int](), [], list(scores[:prompt])
    for seen in range(prompt, len(scores) + 1):
        if seen > prompt:
            buffer.append(scores[seen - 1])
        if len(buffer) > window:
            count = len(buffer) - window
            leaving, buffer = buffer[:count], buffer[count:]
            shift = seen - count - window
            gone |= {i + shift for i, score in enumerate(leaving) if score < threshold}
        found.append(set(gone))
    return found


class Random(Thresholded):
    """Those that drew high numbers stay: `drawn` [K, S]."""

    drawn: np.ndarray

    def score(self, head: int, pos: int) -> float:
        return float(self.drawn[head, pos])
