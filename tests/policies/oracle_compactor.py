"""Compactor, literally: leverage of keys, and attention from both sides, in NumPy loops, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest, shares
from policies.oracle_scoring import pooled

FACTS = {
    "compactor": Facts(
        published={
            "sinks": 8,
            "recent": 4,
            "chunk": 256,
            "sketch": 48,
            "ridge": 0.01,
            "blend": None,
            "scaled": False,
            "per_head": False,
        },
        least={"sinks": 0, "recent": 0, "chunk": 1, "sketch": 1, "ridge": 0, "blend": 0},
        budgets=(({"sinks": 8, "recent": 4}, 12),),
        small={"sketch": 6},
        golden={"budget": 12, "sinks": 2, "recent": 2, "chunk": 8, "sketch": 6},
        tier="slow",
        whole_prompts=True,
    ),
}


def leverage(keys: np.ndarray, sketch: np.ndarray | None, ridge: float) -> np.ndarray:
    """diag(Y (Yᵀ Y + ridge I)⁻¹ Yᵀ) of keys [n, d], less their mean and sketched by [d, k]."""
    rows = keys - keys.mean(axis=0)
    if sketch is not None:
        rows = rows @ sketch
    inverse = np.linalg.inv(rows.T @ rows + ridge * np.eye(rows.shape[1]))
    return np.einsum("nk,kl,nl->n", rows, inverse, rows)


def attention(queries: np.ndarray, keys: np.ndarray, chunk: int, scale: float) -> np.ndarray:
    """What the queries of each chunk [n, G, d] give to its keys [n, d], from both sides, summed and averaged over the group."""
    total = np.zeros(len(keys))
    for start in range(0, len(keys), chunk):
        part = slice(start, start + chunk)
        total[part] = shares(queries[part] @ keys[part].T * scale).mean(axis=1).sum(axis=0)
    return total


def survivors(
    q: np.ndarray,
    turned: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    budget: int,
    sketch: np.ndarray | None,
    *,
    sinks: int = 8,
    recent: int = 4,
    chunk: int = 256,
    ridge: float = 0.01,
    blend: float | None = None,
    scaled: bool = False,
    per_head: bool = False,
) -> list[list[int]]:
    """Which of n tokens each head keeps, ascending; rotated queries [n, N, d] and keys, unrotated keys and values [n, K, d].

    Args:
        sketch: [K, d, k].
    """
    n, heads, dim = k.shape
    if n <= budget:
        return [list(range(n))] * heads
    group, middle = q.shape[1] // heads, range(sinks, n - recent)
    standing, attended = np.zeros((heads, len(middle))), np.zeros((heads, len(middle)))
    for head in range(heads):
        standing[head] = leverage(k[middle, head], None if sketch is None else sketch[head], ridge)
        own = q[middle][:, head * group : (head + 1) * group]
        given = attention(own, turned[middle, head], chunk, dim**-0.5 if scaled else 1.0)
        attended[head] = pooled(given * np.linalg.norm(v[middle, head], axis=1), 3, "avg")
    axis = 1 if per_head else None
    standing, attended = (
        (x - x.mean(axis=axis, keepdims=True)) / np.maximum(x.std(axis=axis, keepdims=True, ddof=1), 1e-6)
        for x in (standing, attended)
    )
    scores = (1 - budget / n if blend is None else blend) * standing + attended
    kept = []
    for head in range(heads):
        best = highest(scores[head], range(len(middle)), budget - sinks - recent)
        kept.append([*range(sinks), *sorted(sinks + i for i in best), *range(n - recent, n)])
    return kept
