"""Attention Matching, literally: one KV head of one row in NumPy, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest

FACTS = {
    "attention_matching": Facts(
        published={"chunk": 2000, "overlap": 8, "prefix": 0, "queries": 50000, "steps": 2, "bound": 3.0},
        least={"chunk": 1, "overlap": 0, "prefix": 0, "queries": 1, "steps": 0, "bound": 0},
        budgets=(({"prefix": 3}, 3),),
        bounds=("queries",),
        golden={"budget": 12},
        tier="long",
        whole_prompts=True,
    ),
}


def matched(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, count: int, steps: int = 2, bound: float = 3.0
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Which keys are kept, and the weights and values with which they stand for all.

    Args:
        queries: [M, H], reference queries of all heads that read this one, rotated.
        keys, values: [n, H], of the prompt; keys are rotated.
        count: of keys that are kept.
    """
    logits = queries @ keys.T / np.sqrt(keys.shape[1])
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=1, keepdims=True)
    best = sorted(highest(np.sqrt((shares**2).mean(axis=0)), range(len(keys)), count))

    kept, wanted = exponentials[:, best], exponentials.sum(axis=1)
    weight = np.clip(np.linalg.lstsq(kept, wanted)[0], np.exp(-bound), np.exp(bound))
    for _ in range(steps):
        slope = kept.T @ (kept @ weight - wanted)
        weight = np.clip(weight - slope / np.linalg.norm(kept, 2) ** 2, np.exp(-bound), np.exp(bound))

    mixed = kept * weight
    mixed /= mixed.sum(axis=1, keepdims=True)
    return best, weight, np.linalg.lstsq(mixed, shares @ values)[0]
