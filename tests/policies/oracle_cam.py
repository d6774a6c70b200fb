"""CaM, literally: one row in NumPy and lists, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, softmax
from policies.oracle_scoring import Row

FACTS = {
    "cam": Facts(
        published={"sinks": 4, "merge": 16},
        least={"merge": 1, "sinks": 0},
        budgets=(({"sinks": 4}, 5),),
        golden={"budget": 12, "sinks": 2, "merge": 4},
        tier="slow",
    ),
}


class CaM(Row):
    """A rolling window whose leaving tokens are merged into the next `merge` ones, where the number `drawn` [K, S] is small."""

    sinks, merge = 4, 16
    drawn: np.ndarray

    def prefill(self) -> list[set[int]]:
        """Sinks and the most recent tokens, with the attention that they have got in the prompt."""
        recent = self.budget - self.sinks
        positions = [p for p in range(self.length) if p < self.sinks or p >= self.length - recent]
        for head in range(self.heads):
            mass = self.mass(head, self.length)
            self.held.append({pos: mass[pos] for pos in positions})
        self.merges = 0
        return self.kept()

    def step(self, pos: int) -> np.ndarray:
        """Append and attend, keys and query at their places in the cache."""
        outputs = []
        for head, held in enumerate(self.held):
            held[pos] = 0.0
            positions = list(held)
            keys = rotate(ROPE, self.k[positions, head], np.arange(len(positions)))
            for n in self.queries_of(head):
                query = rotate(ROPE, self.q[pos, n], len(positions) - 1)
                probs = softmax(keys @ query / np.sqrt(len(query)))
                outputs.append(probs @ self.v[positions, head])
                for p, share in zip(positions, probs, strict=True):
                    held[p] += share / self.group
        return np.stack(outputs)

    def evict(self) -> None:
        for head, held in enumerate(self.held):
            if len(held) > self.budget:
                leaving = min(pos for pos in held if pos >= self.sinks)
                following = sorted(pos for pos in held if pos > leaving)[: self.merge]
                chance = np.clip(held[leaving] / np.mean([held[pos] for pos in following]), 0, 1)
                if self.drawn[head, leaving] < chance:
                    self.merges += 1
                    for pos in following:
                        self.v[pos, head] += self.v[leaving, head] / len(following)
                del held[leaving]
