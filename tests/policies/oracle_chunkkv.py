"""ChunkKV, literally: observe, score chunks, keep the best ones whole, in NumPy and lists. Written for reading."""

import numpy as np
from policies.driver import ROPE, rotate, softmax


def observed(queries: np.ndarray, keys: np.ndarray, window: int, score: str = "softmax") -> np.ndarray:
    """Attention that each of n tokens gets from the last `window` queries [n, G, H]; keys [n, H]. Sum over queries, mean over G."""
    n, group, dim = queries.shape
    turned = np.stack([rotate(ROPE, key, pos) for pos, key in enumerate(keys)])
    total = np.zeros(n)
    for pos in range(max(0, n - window), n):
        for g in range(group):
            query = rotate(ROPE, queries[pos, g], pos)
            if score == "raw":
                total += turned @ query / group
            else:
                total[: pos + 1] += softmax(turned[: pos + 1] @ query / np.sqrt(dim)) / group
    return total


def pooled(a: np.ndarray, width: int) -> np.ndarray:
    """Average over `width` neighbours, zeros beyond the ends."""
    half = width // 2
    padded = np.concatenate([np.zeros(half), a, np.zeros(half)])
    return np.asarray([padded[i : i + width].mean() for i in range(len(a))])


def survivors(
    heads: list[np.ndarray],
    budget: int,
    chunk: int,
    window: int,
    agg: str = "sum",
    pool: int | None = None,
    shared_heads: bool = False,
    strict: bool = False,
    rule: str = "paper",
) -> list[list[int]]:
    """Which of n tokens each head keeps, ascending, given the attention that each token gets in each head."""
    n = len(heads[0])
    if n <= budget:
        return [list(range(n)) for _ in heads]
    scored = n if strict else n - window
    heads = [a[:scored] if pool is None else pooled(a[:scored], pool) for a in heads]
    if rule == "kvpress":  # the window's tokens score as high as any
        heads = [np.concatenate([a, np.full(window, np.max(heads))]) for a in heads]
    if shared_heads:
        heads = [np.sum(heads, axis=0)] * len(heads)
    kept = []
    for a in heads:
        chunks = [range(start, min(start + chunk, len(a))) for start in range(0, len(a), chunk)]
        totals = [np.sum(a[list(c)]) if agg == "sum" else np.mean(a[list(c)]) for c in chunks]
        if rule == "kvpress":
            k, always = max(1, len(chunks) * budget // n), set()
        else:
            k, always = min((budget - window) // chunk, len(chunks)), set(range(n - window, n))
        best = sorted(range(len(chunks)), key=lambda i: (-totals[i], i))[:k]
        kept.append(sorted({pos for i in best for pos in chunks[i]} | always))
    return kept


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, held: list[int], pos: int) -> np.ndarray:
    """Attention output of one query [H] at `pos` over the held positions of keys and values [S, H]."""
    turned = np.stack([rotate(ROPE, keys[p], p) for p in held])
    return softmax(turned @ rotate(ROPE, query, pos) / np.sqrt(len(query))) @ values[held].astype(np.float64)
