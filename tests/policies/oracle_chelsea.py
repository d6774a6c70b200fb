"""Chelsea, literally: the paper's Algorithm 1 and Chunked Soft Matching in NumPy and lists, for one KV head. Written for reading."""

import math
from fractions import Fraction

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, softmax

FACTS = {
    "chelsea": Facts(
        published={"sinks": 16, "recent": 64, "chunk": 256, "schedule": "llama-3"},
        least={"sinks": 0, "recent": 0, "chunk": 2, "every": 1, "alpha": 0, "steps": 0},
        bounds=("recent",),
        golden={"budget": 16, "sinks": 2, "recent": 4, "chunk": 8, "every": 4},
        tier="slow",
    ),
}


def ratio(schedule: tuple[float, float, int], r_min: float, i: int) -> Fraction:
    """r at clustering step i (appendix C.2), as an exact number."""
    r_init, alpha, steps = schedule
    return max(Fraction(str(r_init)) - Fraction(str(alpha)) * min(steps, i), Fraction(str(r_min)))


def regions(budget: int, sinks: int, recent: int | float) -> tuple[int, int]:
    """First and latest tokens that are never merged: fewer where they would fill the budget, of which the latest may be a fraction."""
    if isinstance(recent, float):
        recent = math.floor(Fraction(str(recent)) * budget)
    return (sinks, recent) if sinks + recent < budget else (min(sinks, budget // 4), min(recent, budget // 2))


def count_edges(tokens: int, chunk: int) -> int:
    """Tokens at even places of chunks of at least two."""
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    return sum(math.ceil(size / 2) for size in sizes if size > 1)


def similarities(keys: np.ndarray) -> np.ndarray:
    """Cosine similarity of all pairs, in multiples of 2^-14: what is closer together counts as equal."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    return np.round(unit @ unit.T * 2**14)


def scrambled(pos: int) -> int:
    """The last steps of MurmurHash3."""
    x = pos
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def halves(tokens: list[dict], partition: str) -> tuple[list[int], list[int]]:
    """Places of the sets A and B in a chunk, in the order in which equal edges are told apart."""
    places = list(range(len(tokens)))
    if partition == "halves":
        middle = math.ceil(len(places) / 2)
        return places[:middle], places[middle:]
    if partition == "random":
        places.sort(key=lambda place: scrambled(tokens[place]["pos"]))
    return places[0::2], places[1::2]


def likeness(tokens: list[dict], match: str) -> np.ndarray:
    """How strong an edge between any two tokens of a chunk is."""
    if match == "positions":
        pos = np.asarray([token["pos"] for token in tokens])
        return -np.abs(pos[:, None] - pos).astype(float)
    return similarities(np.stack([token["k" if match == "rotated" else "u"] for token in tokens]))


def soft_matching(
    tokens: list[dict],
    count: int,
    chunk: int,
    match: str = "rotated",
    merge: str = "rotated",
    partition: str = "alternating",
) -> list[dict]:
    """Merge along the `count` most similar edges of all chunks."""
    edges = []
    for start in range(0, len(tokens), chunk):
        similar = likeness(tokens[start : start + chunk], match)
        a_places, b_places = halves(tokens[start : start + chunk], partition)
        if b_places:
            for a in a_places:
                best = max(b_places, key=lambda b: similar[a, b])  # the first, if several
                edges.append((similar[a, best], start + a, start + best))
    edges.sort(key=lambda edge: -edge[0])  # stable: of equally similar edges, the first ones
    members = {i: [i] for i in range(len(tokens))}
    for _, a, b in edges[:count]:
        members[b].append(a)
        del members[a]
    left = [merged([tokens[i] for i in members[place]], merge) for place in sorted(members)]
    return left if partition == "alternating" else sorted(left, key=lambda token: token["pos"])


def merged(tokens: list[dict], merge: str) -> dict:
    """The centroid of some tokens or clusters, each counted by its degree."""
    total, pos = sum(t["n"] for t in tokens), max(t["pos"] for t in tokens)

    def mean(name: str) -> np.ndarray:
        return np.sum([t["n"] * t[name] for t in tokens], axis=0) / total

    k = mean("k") if merge == "rotated" else rotate(ROPE, mean("u"), pos)
    u = mean("u") if merge == "unrotated" else rotate(ROPE, k, -pos)
    return {"k": k, "u": u, "v": mean("v"), "n": total, "pos": pos}


class ChelseaHead:
    """One KV head of a Chelsea cache: entries {k (rotated), u (k turned back), v, n, pos} in order."""

    def __init__(
        self,
        budget: int,
        sinks: int,
        recent: int | float,
        chunk: int | None,
        every: int,
        schedule,
        r_min: float,
        **options: str,
    ) -> None:
        self.options = options
        self.budget, self.chunk, self.every = budget, chunk, every
        self.sinks, self.recent = regions(budget, sinks, recent)
        self.schedule, self.r_min = schedule, r_min
        self.entries: list[dict] = []
        self.steps = 0

    def prefill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in a prompt: keys (unrotated) and values [n, H]."""
        for pos, (k, v) in enumerate(zip(keys, values, strict=True)):
            self._append(k, v, pos)
        self._compress()

    def step(self, queries: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int) -> np.ndarray:
        """Append a token, attend with the group's queries [G, H], cluster; the attention output [G, H]."""
        self._append(k, v, pos)
        keys, values = (np.stack([e[name] for e in self.entries]) for name in "kv")
        bias = np.log([e["n"] for e in self.entries])
        probs = [softmax(keys @ rotate(ROPE, q, pos) / np.sqrt(len(q)) + bias) for q in queries]
        self._compress()
        return np.stack(probs) @ values

    def _append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        key = k.astype(np.float64)
        self.entries.append({"k": rotate(ROPE, k, pos), "u": key, "v": v.astype(np.float64), "n": 1, "pos": pos})

    def _compress(self) -> None:
        if len(self.entries) < self.budget + self.every:
            return
        while len(self.entries) > self.budget:
            end = len(self.entries) - self.recent
            first, middle, last = self.entries[: self.sinks], self.entries[self.sinks : end], self.entries[end:]
            chunk = self.chunk or len(middle)
            r = ratio(self.schedule, self.r_min, self.steps)
            most = min(len(middle) // 2, count_edges(len(middle), chunk), len(self.entries) - self.budget)
            middle = soft_matching(middle, min(max(math.floor(r * len(middle)), 1), most), chunk, **self.options)
            self.entries = first + middle + last
            self.steps += 1
