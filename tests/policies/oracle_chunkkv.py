"""ChunkKV, literally: observe, score chunks, keep the best ones whole, in NumPy and lists. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares, softmax

FACTS = {
    "chunkkv": Facts(
        published={"chunk": 10, "window": 32, "reuse": 1, "score": "softmax", "agg": "sum", "pool": None},
        least={"chunk": 1, "window": 1, "reuse": 1, "pool": 1},
        budgets=(({"window": 32}, 32),),
        golden={"budget": 14, "chunk": 4, "window": 4, "reuse": 2},
    ),
}


def observed(queries: np.ndarray, keys: np.ndarray, window: int, score: str = "softmax") -> np.ndarray:
    """Attention that each of n tokens gets from the last `window` queries [n, G, H]; keys [n, H]. Sum over queries, mean over G."""
    n, _, dim = queries.shape
    turned = rotate(ROPE, keys, np.arange(n))
    at = np.arange(max(0, n - window), n)[:, None]
    products = rotate(ROPE, queries[at[:, 0]], at) @ turned.T  # [w, G, n]
    if score != "raw":
        products = shares(products / np.sqrt(dim), np.arange(n) <= at[..., None])
    return products.mean(axis=1).sum(axis=0)


def pooled(a: np.ndarray, width: int) -> np.ndarray:
    """Average over `width` neighbours, zeros beyond the ends."""
    half = width // 2
    padded = np.concatenate([np.zeros(half), a, np.zeros(half)])
    return np.lib.stride_tricks.sliding_window_view(padded, width).mean(axis=1) if len(a) else a


def survivors(
    heads: list[np.ndarray],
    budget: int | float,
    chunk: int,
    window: int,
    agg: str = "sum",
    pool: int | None = None,
    shared_heads: bool = False,
    strict: bool = False,
    rule: str = "paper",
) -> list[list[int]]:
    """Which of n tokens each head keeps, ascending, given the attention that each token gets in each head.

    By kvpress' rule a budget may be a share of the prompt.
    """
    n = len(heads[0])
    if n <= window or budget >= (n if isinstance(budget, int) else 1):
        return [list(range(n)) for _ in heads]
    scored = n if strict else n - window
    heads = [a[:scored] if pool is None else pooled(a[:scored], pool) for a in heads]
    if rule == "kvpress":  # the window's tokens score higher than any
        heads = [np.concatenate([a, np.full(window, np.max(heads) + 1)]) for a in heads]
        if n < chunk:
            count = max(1, budget if isinstance(budget, int) else int(n * budget))
            return [sorted(np.argsort(-a, kind="stable")[:count].tolist()) for a in heads]
    if shared_heads:
        heads = [np.sum(heads, axis=0)] * len(heads)
    kept = []
    for a in heads:
        chunks = [range(start, min(start + chunk, len(a))) for start in range(0, len(a), chunk)]
        totals = [np.sum(a[list(c)]) if agg == "sum" else np.mean(a[list(c)]) for c in chunks]
        if rule == "kvpress":
            whole = len(chunks) * budget
            k, always = max(1, whole // n if isinstance(budget, int) else int(whole)), set()
        else:
            k, always = min((budget - window) // chunk, len(chunks)), set(range(n - window, n))
        best = sorted(range(len(chunks)), key=lambda i: (-totals[i], i))[:k]
        kept.append(sorted({pos for i in best for pos in chunks[i]} | always))
    return kept


def kvpress(attention: np.ndarray, ratio: float, chunk: int, pool: int) -> list[list[int]]:
    """What kvpress 0.5.5 keeps of a prompt, by KV head: ChunkKVPress around SnapKVPress.

    Args:
        attention: probabilities that the window's w queries give to the n - w tokens before it, [K, G, w, n - w].
        ratio: compression ratio, the share that is dropped.
    """
    heads, _, window, before = attention.shape
    n = before + window
    scores = np.stack([np.mean([pooled(a, pool) for a in group], axis=0) for group in attention.mean(axis=2)])
    scores = np.concatenate([scores, np.full((heads, window), scores.max() + 1)], axis=1)
    complete, rest = divmod(n, chunk)
    if complete == 0:
        kept = max(1, int(n * (1 - ratio)))
        return [sorted(np.argsort(-head, kind="stable")[:kept].tolist()) for head in scores]
    total = scores.sum(axis=0)
    means = [total[i * chunk : (i + 1) * chunk].mean() for i in range(complete)]
    if rest:
        means.append(total[-rest:].mean())
    best = np.argsort(-np.asarray(means), kind="stable")[: max(1, int(len(means) * (1 - ratio)))]
    return [sorted(pos for i in best for pos in range(i * chunk, min((i + 1) * chunk, n)))] * heads


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, held: list[int], pos: int) -> np.ndarray:
    """Attention output of one query [H] at `pos` over the held positions of keys and values [S, H]."""
    turned = rotate(ROPE, keys[held], np.asarray(held))
    return softmax(turned @ rotate(ROPE, query, pos) / np.sqrt(len(query))) @ values[held].astype(np.float64)
