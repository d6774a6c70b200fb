"""KVzap and the gates of Fast KVzip, literally: one token after the other, float64. Written for reading."""

import math
from collections.abc import Mapping

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest

FACTS = {
    "fast_kvzip": Facts(
        published={"sinks": 4, "window": 4096, "short_window": 0.02, "long": 16000},
        least={"sinks": 0, "window": 0, "short_window": 0, "long": 0},
        budgets=(({"sinks": 4}, 4),),
        small={"long": 40},
        golden={"budget": 12, "sinks": 2},
        tier="long",
        whole_prompts=True,
    ),
    "kvzap": Facts(
        published={"sinks": 0, "window": 128, "scope": "layer"},
        least={"sinks": 0, "window": 0},
        budgets=(({}, 1),),
        golden={"budget": 12, "sinks": 2, "window": 4},
        tier="long",
        whole_prompts=True,
    ),
}


def kvzap(weights: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What a network predicts of one token, by KV head: a linear map, or one with a layer of GELU units before it."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        matrix, bias = (weights[f"{name}{part}"].astype(np.float64) for part in ("weight", "bias"))
        return matrix @ x + bias

    if "weight" in weights:
        return linear("", x)
    units = [u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in linear("0.", x)]
    return linear("2.", np.asarray(units))


def gate(weights: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What a gate makes of one token, by KV head: the softmax share of its own key beside the trained ones, mean over queries."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    heads, _, beside, rank = w["k_base"].shape
    group = w["b"].shape[-1]

    def normed(v: np.ndarray, name: str) -> np.ndarray:
        return v / math.sqrt(np.mean(v**2) + 1e-6) * w[name]

    queries, keys = w["q_proj.weight"] @ x + w["q_proj.bias"], w["k_proj.weight"] @ x
    found = []
    for head in range(heads):
        key = normed(keys[head * rank : (head + 1) * rank], "k_norm.weight")
        shares = []
        for g in range(group):
            at = (head * group + g) * rank
            query = normed(queries[at : at + rank], "q_norm.weight")
            logit = query @ key / math.sqrt(rank) + w["b"][head, 0, g]
            rivals = [query @ w["k_base"][head, 0, s] / math.sqrt(rank) for s in range(beside)]
            shares.append(1 / (1 + sum(math.exp(rival - logit) for rival in rivals)))
        found.append(sum(shares) / group)
    return np.asarray(found)


def survivors(scores: np.ndarray, budget: int, scope: str, first: int, last: int) -> list[set[int]]:
    """Which tokens each head keeps of a prompt by scores [K, T]: its ends, as far as the budget goes, and what scores highest."""
    heads, length = scores.shape
    if length <= budget:
        return [set(range(length)) for _ in range(heads)]
    last = min(last, budget - first)
    ends = {*range(first), *range(length - last, length)}
    between = [at for at in range(length) if at not in ends]
    if scope == "head":
        return [ends | set(highest(row, between, budget - len(ends))) for row in scores]
    flat, places = scores.reshape(-1), [head * length + at for head in range(heads) for at in between]
    best = highest(flat, places, (budget - len(ends)) * heads)
    return [ends | {at % length for at in best if at // length == head} for head in range(heads)]
