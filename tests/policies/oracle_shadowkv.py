"""ShadowKV, literally: Algorithms 1 and 2 of the paper in NumPy and lists, for one row of a layer. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares

FACTS = {
    "shadowkv": Facts(
        published={"rank": 160, "chunk": 8, "outlier_chunks": 48, "local_chunks": 4},
        least={"rank": 1, "chunk": 1, "outlier_chunks": 0, "local_chunks": 0},
        budgets=(({"chunk": 8}, 8),),
        small={"outlier_chunks": 2, "local_chunks": 1},
        bounds=("rank",),
        golden={"budget": 8, "rank": 6, "chunk": 4, "outlier_chunks": 2, "local_chunks": 1},
        tier="slow",
        whole_prompts=True,
    ),
}


class ShadowLayer:
    """All KV heads of a layer.

    Attributes:
        exact: for each head, rotated key and value by position.
        chunks: for each head, the chunks that can be selected, with their landmarks.
        rebuilt: [n, K, H], the prompt's unrotated keys at low rank.
    """

    def __init__(self, budget: int, rank: int, chunk: int, outlier_chunks: int, local_chunks: int) -> None:
        self.budget, self.rank, self.chunk = budget, rank, chunk
        self.outliers, self.local = outlier_chunks, local_chunks

    def prefill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in a prompt: unrotated keys and values [n, K, H]."""
        n, heads, dim = keys.shape
        u, sigma, vt = np.linalg.svd(keys.astype(np.float64).reshape(n, heads * dim), full_matrices=False)
        self.rebuilt = ((u * sigma)[:, : self.rank] @ vt[: self.rank]).reshape(n, heads, dim)
        self.values = values.astype(np.float64)
        self.exact: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []
        self.chunks: list[dict[int, np.ndarray]] = []
        count = max(n // self.chunk - self.local, 0)
        for head in range(heads):
            turned = rotate(ROPE, keys[:n, head], np.arange(n))
            members = {i: range(i * self.chunk, (i + 1) * self.chunk) for i in range(count)}
            landmarks = {i: turned[list(at)].mean(axis=0) for i, at in members.items()}

            def least_cosine(i, turned=turned, members=members, landmarks=landmarks):
                mark = landmarks[i]
                return min(turned[t] @ mark / np.linalg.norm(turned[t]) / np.linalg.norm(mark) for t in members[i])

            outliers = sorted(members, key=least_cosine)[: self.outliers]
            self.chunks.append({i: mark for i, mark in landmarks.items() if i not in outliers})
            kept = [t for i in outliers for t in members[i]] + list(range(count * self.chunk, n))
            self.exact.append({t: (turned[t], self.values[t, head]) for t in kept})

    def append(self, keys: np.ndarray, values: np.ndarray, pos: int) -> None:
        """One more token: unrotated key and value [K, H]."""
        for head, held in enumerate(self.exact):
            held[pos] = rotate(ROPE, keys[head], pos), values[head].astype(np.float64)

    def selected(self, turned: np.ndarray, head: int) -> list[int]:
        """Prompt tokens that the rotated queries of a group [G, H] select."""
        marks = self.chunks[head]
        if not marks:
            return []
        attention = shares(turned @ np.stack(list(marks.values())).T / np.sqrt(turned.shape[-1])).max(axis=0)
        order = np.asarray(list(marks))[np.argsort(-attention, kind="stable")]
        return [int(i) * self.chunk + j for i in order[: self.budget // self.chunk] for j in range(self.chunk)]

    def attend(self, queries: np.ndarray, pos: int, head: int) -> tuple[np.ndarray, list[int]]:
        """What the queries of a group [G, H] get [G, H], and what they select."""
        turned = rotate(ROPE, queries, pos)
        chosen = self.selected(turned, head)
        exact = [np.reshape([pair[i] for pair in self.exact[head].values()], (-1, turned.shape[-1])) for i in (0, 1)]
        keys = np.concatenate([rotate(ROPE, self.rebuilt[chosen, head], np.asarray(chosen, int)), exact[0]])
        values = np.concatenate([self.values[chosen, head], exact[1]])
        return shares(turned @ keys.T / np.sqrt(keys.shape[-1])) @ values, chosen
