"""KVzip, literally: what is given to a prompt when it is read again, and what heads keep of it, in NumPy loops, float64."""

import math

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest, shares

FACTS = {
    "kvzip": Facts(
        published={
            "scope": "model",
            "chunk": 2000,
            "overlap": 8,
            "sinks": 4,
            "prefix": None,
            "queries": "all",
            "slack": 1.1,
            "plus": False,
        },
        least={"chunk": 1, "overlap": 0, "sinks": 0, "prefix": 0, "slack": 1},
        budgets=(({"sinks": 4}, 4), ({"sinks": 4, "prefix": 9}, 9)),
        golden={"budget": 12, "chunk": 16, "overlap": 2, "sinks": 2},
        tier="slow",
        whole_prompts=True,
    ),
}


def part_scores(
    queries: np.ndarray,
    sinks: np.ndarray,
    part: np.ndarray,
    own: np.ndarray,
    asking: range | None = None,
    values: np.ndarray | None = None,
    inputs: np.ndarray | None = None,
) -> np.ndarray:
    """The most that any query gives to each key of a part.

    Args:
        queries: [R, G, d], rotated, of what is read now, in the group that reads one KV head.
        sinks, part, own: keys of the first tokens, of the part [c, d], and of what is read now [R, d], rotated.
        asking: which of the queries score; all by default.
        values: [G, c], of KVzip+, how long the value of each key is behind the output projection of each query head.
        inputs: [R], likewise, how long what each query was made of is.
    """
    at = np.asarray(asking if asking is not None else range(len(queries)))
    keys, before = np.concatenate([sinks, part, own]), len(sinks) + len(part)
    visible = np.arange(len(keys)) <= before + at[:, None, None]
    given = shares(queries[at] @ keys.T / math.sqrt(keys.shape[1]), visible)[..., len(sinks) : before]
    if values is not None and inputs is not None:
        given = given * values / inputs[at, None, None]
    return given.max(axis=(0, 1), initial=0)


def parts(length: int, chunk: int, prefix: int) -> list[range]:
    """Positions of the parts of a prompt."""
    return [range(start, min(start + chunk, length)) for start in range(prefix, length, chunk)]


def survivors(
    scores: np.ndarray, budget: int, *, scope: str = "model", sinks: int = 4, prefix: int = 0, slack: float = 1.1
) -> list[list[list[int]]]:
    """Which of n tokens heads keep, by scores [L, K, n]: by layer and head, ascending."""
    layers, heads, n = scores.shape
    if n <= budget:
        return [[list(range(n))] * heads] * layers
    first = max(sinks, prefix)
    rivals = [(layer, head, i) for layer in range(layers) for head in range(heads) for i in range(first, n)]
    mean = budget - first  # tokens of the average head
    value = {rival: scores[rival] for rival in rivals}

    def best(among: list[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
        chosen = highest([value[rival] for rival in among], range(len(among)), count)
        return [among[i] for i in chosen]

    kept: list[tuple[int, int, int]] = []
    if scope == "head":
        for layer in range(layers):
            for head in range(heads):
                kept += best([rival for rival in rivals if rival[:2] == (layer, head)], mean)
    else:
        most = mean if scope == "layer" else min(math.floor(budget * slack), n) - first
        for layer in range(layers):
            kept += best([rival for rival in rivals if rival[0] == layer], most * heads)
        if scope == "model":
            kept = best(sorted(kept), mean * heads * layers)
    return [
        [[*range(first), *sorted(i for *at, i in kept if at == [layer, head])] for head in range(heads)]
        for layer in range(layers)
    ]
