"""`chunkkv` over any scorer, literally: kvpress 0.5.5's two presses on given scores, in NumPy and lists, float64. Written for reading."""

import math

import numpy as np


def raised(heads: np.ndarray, first: int, last: int) -> np.ndarray:
    """Scores [K, n] summed over heads; tokens at the ends score one more than the highest of the others in each head."""
    heads = np.array(heads, np.float64)
    n = heads.shape[1]
    between = heads[:, first : n - last]
    ends = [i for i in range(n) if i < first or i >= n - last]
    heads[:, ends] = between.max() + 1
    return heads.sum(axis=0)


def best(scores: np.ndarray, candidates: list[int], count: int) -> list[int]:
    """The candidates with the highest scores, the earlier of equal ones."""
    return sorted(candidates, key=lambda i: (-scores[i], i))[: max(count, 0)]


def chunks_of(positions: list[int], chunk: int) -> list[list[int]]:
    """Positions of a text by the chunk of the text that they are in."""
    found: dict[int, list[int]] = {}
    for pos in positions:
        found.setdefault(pos // chunk, []).append(pos)
    return [found[key] for key in sorted(found)]


def whole(scores: np.ndarray, budget: int, chunk: int) -> list[int]:
    """`ChunkKVPress`: which of n tokens stay by their summed scores [n]; n is more than the budget, and at least a chunk."""
    n = len(scores)
    chunks = chunks_of(list(range(n)), chunk)
    means = np.asarray([scores[c].mean() for c in chunks])
    count = max(1, len(chunks) * budget // n)
    return sorted(pos for i in best(means, list(range(len(chunks))), count) for pos in chunks[i])


def entropy(scores: np.ndarray) -> float:
    """Normalised entropy of the scores of one chunk."""
    if len(scores) == 1:
        return 0.0
    scores = scores - min(scores.min(), 0)
    shares = scores / (scores.sum() + 1e-8)
    return min(max(-sum(p * math.log(p + 1e-8) for p in shares) / math.log(len(scores)), 0.0), 1.0)


def gated(scores: np.ndarray, budget: int, chunk: int, spiky: int, positions: list[int] | None = None) -> list[int]:
    """`EntropyGatedChunkKVPress`: which tokens stay, of more than the budget, by their summed scores [n].

    Args:
        positions: in the text, of tokens of which some others are gone; all of the text without it.
    """
    positions = list(range(len(scores))) if positions is None else positions
    place = {pos: i for i, pos in enumerate(positions)}
    chunks = [[place[pos] for pos in c] for c in chunks_of(positions, chunk)]
    means = np.asarray([scores[c].mean() for c in chunks])
    entropies = [entropy(scores[c]) for c in chunks]
    middle = (len(chunks) - 1) // 2
    score_threshold, entropy_threshold = sorted(means)[middle], sorted(entropies)[middle]
    kept: list[int] = []
    for i in best(means, list(range(len(chunks))), len(chunks)):
        count = min(len(chunks[i]), budget - len(kept))
        if means[i] >= score_threshold and entropies[i] < entropy_threshold:
            count = min(count, spiky)
        kept += best(scores, chunks[i], count)
    others = [i for i in range(len(scores)) if i not in kept]
    kept += best(scores, others, budget - len(kept))
    return sorted(positions[i] for i in kept)
