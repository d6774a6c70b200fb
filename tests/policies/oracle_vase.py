"""VaSE, literally: ranges of values, attention and random projections, in NumPy loops, float64. Written for reading.

Random numbers are those of threefry, folded in one after the other: seed, layer, tokens seen, head, position.
"""

import functools

import jax
import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest, shares
from policies.oracle_recompress import Rounds
from policies.oracle_scoring import pooled

from kvjax._util.randomness import normal, random_key, uniform

FACTS = {
    "vase": Facts(
        published={"every": 64, "variant": "attnv", "sinks": 4, "share": 0.25, "kernel": 5, "sketch": 20},
        least={"every": 1, "sinks": 0, "share": 0, "kernel": 1, "sketch": 1},
        budgets=(({"every": 16, "sinks": 2}, 18),),
        golden={"budget": 14, "every": 4, "sinks": 2},
        tier="slow",
    ),
}


@functools.cache
def uniforms(seed: int, layer: int, seen: int, head: int) -> np.ndarray:
    """The numbers of 128 positions."""
    key = random_key(seed)
    for number in (layer, seen, head):
        key = jax.random.fold_in(key, number)
    places = np.arange(128, dtype=np.int32)
    return np.asarray(jax.vmap(lambda at: uniform(jax.random.fold_in(key, at)))(places), np.float64)


@functools.cache
def projection(seed: int, layer: int, seen: int, size: int, sketch: int) -> np.ndarray:
    """The random matrix [H, r] of a round."""
    key = jax.random.fold_in(jax.random.fold_in(random_key(seed), layer), seen)
    return np.asarray(normal(key, (size, sketch)), np.float64) / np.sqrt(sketch)


def sample(weights: np.ndarray, drawn: np.ndarray, count: int) -> list[int]:
    """`count` of the indices without replacement: those with the highest logarithm of their weight plus Gumbel noise."""
    noise = -np.log(-np.log(np.maximum(drawn, 2.0**-25)))
    return highest(np.log(np.maximum(weights, 1.2e-38)) + noise, range(len(weights)), count)


class VaSE(Rounds):
    """One row; options as those of the policy."""

    variant, sinks, share, kernel, sketch, seed, layer = "attnv", 4, 0.25, 5, 20, 0, 0

    def round(self, entries: list[list[int]]) -> list[list[int]]:
        return [e if len(e) <= self.budget else self.chosen(head, e) for head, e in enumerate(entries)]

    def chosen(self, head: int, entries: list[int]) -> list[int]:
        """What a round leaves of one head's entries."""
        recent, before = entries[-self.every :], entries[: -self.every]
        kept = [pos for pos in before if pos < self.sinks]
        others = [pos for pos in before if pos >= self.sinks]
        room = self.budget - len(recent) - len(kept)
        if self.variant == "dkv":
            g = projection(self.seed, self.layer, self.seen, self.k.shape[-1], self.sketch)
            size = {p: ((self.k_turned[p, head] @ g) ** 2).sum() * ((self.v[p, head] @ g) ** 2).sum() for p in others}
            return sorted([*kept, *highest(size, others, room), *recent])
        spread = {p: self.v[p, head].max() - self.v[p, head].min() for p in others}
        count = min(max(int(self.budget * self.share) - self.sinks, 0), room)
        large = highest(spread, others, count)
        weights = self.attention_of(head, before)
        rest = [p for p in others if p not in large]
        drawn = uniforms(self.seed, self.layer, self.seen, head)
        sampled = sample(np.asarray([weights[before.index(p)] for p in rest]), drawn[rest], room - count)
        return sorted([*kept, *large, *(rest[i] for i in sampled), *recent])

    def attention_of(self, head: int, before: list[int]) -> np.ndarray:
        """Mean attention of the last queries to what is before them, which sums to 1 for each query, pooled."""
        at = np.arange(self.seen - self.every, self.seen)[:, None]
        queries = self.q_turned[at[:, 0]][:, self.queries_of(head)]
        visible = np.asarray(before) > at - self.sliding
        found = shares(queries @ self.k_turned[before, head].T / np.sqrt(self.k.shape[-1]), visible[:, None])
        return np.mean([pooled(one, self.kernel, "avg") for one in found.mean(axis=0)], axis=0)


BLOCKS = {
    "vase": (VaSE, {"budget": 18, "every": 5, "sinks": 2}, 4, 2),
    "vase, dkv": (VaSE, {"budget": 16, "every": 4, "sinks": 1, "variant": "dkv"}, 2, 2),
}
