"""DuoAttention, literally: streaming and retrieval heads as lists, and their mixture, in NumPy. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares, softmax

FACTS = {
    "duoattention": Facts(
        published={"sinks": 64, "budget": 320},
        least={"sinks": 0, "sparsity": 0},
        budgets=(({"sinks": 64}, 65),),
        golden={"budget": 12, "sinks": 2},
    ),
}


class DuoHead:
    """One KV head. A streaming head holds the first tokens and the most recent ones, `budget` in all."""

    def __init__(self, streaming: bool, budget: int, sinks: int) -> None:
        self.streaming, self.budget, self.sinks = streaming, budget, sinks
        self.held: list[tuple[int, np.ndarray, np.ndarray]] = []

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """One more token."""
        self.held.append((pos, rotate(ROPE, k, pos), v.astype(np.float64)))

    def trim(self) -> None:
        """Let the oldest token go that is no sink."""
        while self.streaming and len(self.held) > self.budget:
            self.held.pop(self.sinks)

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H], at original positions."""
        keys, values = (np.stack([entry[i] for entry in self.held]) for i in (1, 2))
        return shares(rotate(ROPE, queries, pos) @ keys.T / np.sqrt(keys.shape[-1])) @ values


def mixed(q, k, v, gate: float, sinks: int, recent: int) -> np.ndarray:
    """One head over a text [T, H]: full attention with weight `gate`, and for the rest attention to sinks and recent tokens."""
    keys, queries = (rotate(ROPE, x, np.arange(len(x))) for x in (k, q))
    rows = []
    for pos, query in enumerate(queries):
        row = np.zeros(q.shape[1])
        near = [s for s in range(pos + 1) if s < sinks or pos - s < recent]
        for weight, seen in ((gate, range(pos + 1)), (1 - gate, near)):
            probs = softmax(keys[list(seen)] @ query / np.sqrt(len(query)))
            row += weight * sum(p * v[s] for p, s in zip(probs, seen, strict=True))
        rows.append(row)
    return np.stack(rows)
