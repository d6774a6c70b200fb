"""TriAttention, literally: distances and angles of unrotated keys, with complex numbers, float64. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE
from policies.oracle_recompress import Rounds

FACTS = {
    "triattention": Facts(
        published={
            "budget": 2048,
            "every": 128,
            "window": 128,
            "offsets": 17,
            "agg": "mean",
            "gqa": "max",
            "sets": "each",
            "keep_prompt": False,
        },
        least={"every": 1, "window": 0, "offsets": 1},
        budgets=(({"window": 128}, 128),),
        golden={"budget": 12, "every": 4, "window": 4},
        tier="slow",
    ),
}


def halves(x: np.ndarray) -> np.ndarray:
    """Complex numbers of channels i and i + half."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def score(
    mean: np.ndarray,
    size: np.ndarray,
    key: np.ndarray,
    omega: np.ndarray,
    place: int | np.ndarray,
    seen: int,
    offsets: int,
    agg: str,
) -> np.ndarray:
    """Of one query head, by μ and ρ of each pair, and unrotated keys [..., F], as complex numbers, at places [...]."""
    by_distance, place = [], np.asarray(place)[..., None]
    for delta in (2**i for i in range(offsets)):
        angles = omega * (seen + delta - place) + np.angle(mean * key.conj())
        by_distance.append(np.sum(np.abs(mean) * np.abs(key) * np.cos(angles), axis=-1))
    spread = np.sum((size - np.abs(mean)) * np.abs(key), axis=-1)
    return (np.mean(by_distance, axis=0) if agg == "mean" else np.max(by_distance, axis=0)) + spread


class TriAttention(Rounds):
    """One row; `queries` [N, 3, F] are Re μ, Im μ and ρ of its query heads."""

    window, offsets, agg, gqa = 128, 17, "mean", "max"
    queries: np.ndarray

    def begin(self) -> None:
        super().begin()
        self.last = self.window

    def scored(self, head: int, entries: list[int]) -> np.ndarray:
        scores = np.zeros(len(entries))
        rivals = entries[: max(len(entries) - self.window, 0)]
        if not rivals:
            return scores + 4.0  # which changes no order, and says how near is equal
        own = self.queries[self.queries_of(head)].astype(np.float64)
        if self.gqa == "mean_stats":
            own = own.mean(axis=0, keepdims=True)
        normal = []
        for real, imaginary, size in own:
            found = score(
                real + 1j * imaginary,
                size,
                halves(self.k[rivals, head]),
                np.asarray(ROPE.inv_freq),
                np.asarray(rivals),
                self.seen,
                self.offsets,
                self.agg,
            )
            normal.append((found - found.mean()) / max(found.std(), 1e-6))
        scores[: len(rivals)] = np.mean(normal, axis=0) if self.gqa == "mean" else np.max(normal, axis=0)
        return scores + 4.0  # which changes no order, and says how near is equal


def shared_sets(
    keys: np.ndarray,
    queries: np.ndarray,
    prompt: int,
    *,
    budget: int,
    every: int,
    window: int,
    sets: str,
    keep_prompt: bool,
    block: tuple[int, int] = (0, 0),
) -> list[list[list[list[int]]]]:
    """What the heads of all layers keep of one row after each new token: [step][layer][head], ascending.

    Args:
        keys: [L, T, K, H], unrotated, of the prompt and all new tokens.
        queries: [L, N, 3, F], Re μ, Im μ and ρ.
        prompt: tokens of the prompt, which stay until the first round.
        budget, every, window, sets, keep_prompt: as of the policy.
        block: first and last of new tokens that come at once. A round can only follow the last.
    """
    layers, total, heads = keys.shape[:3]
    group, pinned = queries.shape[1] // heads, prompt if keep_prompt else 0
    held = [[list(range(prompt)) for _ in range(heads)] for _ in range(layers)]
    rounded, steps = prompt, []
    for now in range(prompt, total):
        held = [[[*head, now] for head in layer] for layer in held]
        if now + 1 - rounded >= every and not block[0] <= now < block[1]:
            rounded = now + 1
            held = cut(held, keys, queries, now + 1, group, budget, window, sets, pinned)
        steps.append(held)
    return steps


def cut(held, keys, queries, seen, group, budget, window, sets, pinned) -> list[list[list[int]]]:
    """A round: every query head standardises its scores of the candidates, and all layers decide together."""
    layers, heads, normal = len(held), len(held[0]), {}
    for layer in range(layers):
        for head in range(heads):
            rivals = [i for i in held[layer][head][: len(held[layer][head]) - window] if i >= pinned]
            for own in range(head * group, (head + 1) * group):
                real, imaginary, size = queries[layer, own].astype(np.float64)
                place = np.asarray(rivals, int)
                numbers = halves(keys[layer, rivals, head]), np.asarray(ROPE.inv_freq), place, seen, 17, "mean"
                found = score(real + 1j * imaginary, size, *numbers)
                found = (found - found.mean()) / max(found.std(), 1e-6) if rivals else found
                normal[layer, own] = dict(zip(rivals, found, strict=True))

    def worth(layer: int, head: int, token: int) -> float:
        every = range(heads) if sets == "union" else [head]
        of_layers = range(layers) if sets != "each" else [layer]
        best = [[normal[i, j][token] for h in every for j in range(h * group, (h + 1) * group)] for i in of_layers]
        return max(map(max, best)) if sets == "union" else float(np.mean([max(each) for each in best]))

    kept = [[list[int]() for _ in range(heads)] for _ in range(layers)]
    for layer in range(layers):
        for head in range(heads):
            own = held[layer][head]
            rivals = list(normal[layer, head * group])
            always = [i for i in own if i not in rivals]
            count = budget + pinned - len(always)
            ranked = sorted(rivals, key=lambda i: (-worth(layer, head, i), i))
            kept[layer][head] = own if len(own) <= budget + pinned else sorted([*always, *ranked[:count]])
    return kept
