"""InfiniGen, literally: skewing, partial keys and the count of tokens in NumPy, for one row of a layer. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, softmax

FACTS = {
    "infinigen": Facts(
        published={"budget": 0.2, "alpha": 5.0, "share": 0.2, "dense_layers": 2},
        least={"alpha": 0, "dense_layers": 0},
        budgets=(({}, 2),),
        golden={"budget": 8, "dense_layers": 1, "profile": "prompt"},
        tier="slow",
        whole_prompts=True,
    ),
}


class InfiniLayer:
    """All KV heads of a layer: rotated keys, values, and the directions that scores are told by.

    `channels` that queries, and as many that keys are largest in are chosen among the columns of `matrices` [K, H, H], or
    else among the prompt's own singular vectors.
    """

    def __init__(
        self, budget: int, alpha: float, channels: int, kv_heads: int, matrices: np.ndarray | None = None
    ) -> None:
        self.budget, self.alpha, self.channels, self.matrices = budget, alpha, channels, matrices
        self.keys: list[list[np.ndarray]] = [[] for _ in range(kv_heads)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(kv_heads)]
        self.skew: list[np.ndarray] = []

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        """One more token: unrotated key and value [K, H]."""
        for head, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.keys[head].append(rotate(ROPE, k, len(self.keys[head])))
            self.values[head].append(v.astype(np.float64))

    def prefill(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in a prompt: unrotated queries [n, N, H], keys and values [n, K, H]."""
        for k, v in zip(keys, values, strict=True):
            self.append(k, v)
        group = queries.shape[1] // keys.shape[1]
        for head, held in enumerate(self.keys):
            own = queries[:, head * group : (head + 1) * group]
            turned = rotate(ROPE, own, np.arange(len(own))[:, None]).reshape(-1, own.shape[-1])
            if self.matrices is not None:
                a = self.matrices[head].astype(np.float64)
            elif 2 * self.channels >= queries.shape[2]:
                a = np.eye(queries.shape[2])  # all directions, whichever
            else:
                _, singular, vectors = np.linalg.svd(turned, full_matrices=False)
                a = vectors[singular > 0.003 * singular[0]].T
            sizes = (np.abs(np.stack(x) @ a).sum(axis=0) for x in (turned, held))
            best = {i for size in sizes for i in np.argsort(-size, kind="stable")[: self.channels].tolist()}
            self.skew.append(a[:, sorted(best)])

    def selected(self, turned: np.ndarray) -> list[set[int]]:
        """Of each KV head, what it reads besides the newest token, for rotated queries [N, H]."""
        group = len(turned) // len(self.keys)
        scores = []
        for head, held in enumerate(self.keys):
            query = turned[head * group : (head + 1) * group].mean(axis=0) @ self.skew[head]
            scores.append(np.stack(held[:-1]) @ self.skew[head] @ query / np.sqrt(turned.shape[1]))
        near = [int((s > s.max() - self.alpha).sum()) for s in scores]
        count = min(max(sum(near) // len(near), 1), self.budget - 1)
        return [set(np.argsort(-s, kind="stable")[:count].tolist()) for s in scores]

    def attend(self, turned: np.ndarray, chosen: list[set[int]]) -> np.ndarray:
        """What rotated queries [N, H] get [N, H] from what is chosen and the newest token."""
        group, outputs = len(turned) // len(self.keys), []
        for n, q in enumerate(turned):
            head = n // group
            read = [*sorted(chosen[head]), len(self.keys[head]) - 1]
            keys, values = (np.stack([x[head][t] for t in read]) for x in (self.keys, self.values))
            outputs.append(softmax(keys @ q / np.sqrt(len(q))) @ values)
        return np.stack(outputs)
