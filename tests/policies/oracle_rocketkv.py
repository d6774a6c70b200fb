"""RocketKV, literally: the split of the ratio, and Algorithm 1 of the paper for one KV head, in NumPy and loops. Written for reading.

From the paper (sections 3.3 to 3.6) and the published code: S tokens in all, `new` of which come after the prompt; budget t.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import highest, softmax

FACTS = {
    "rocketkv": Facts(
        published={"window": 32, "kernel": 63, "pool": "max"},
        least={"window": 1, "kernel": 1},
        budgets=(({}, 2),),
        small={"kernel": 3},
        golden={"budget": 8, "window": 4, "kernel": 3},
        tier="slow",
        whole_prompts=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """How the ratio is split for one row.

    Attributes:
        prompt: tokens of the prompt that the first stage keeps.
        page: tokens of a page.
        channels: channels that a query reads of a page's bounds.
        read: tokens that a query reads.
    """

    prompt: int
    page: int
    channels: int
    read: int


def split(tokens: int, new: int, budget: int, dim: int, window: int) -> Split:
    """The split for a sequence of `tokens` tokens, `new` of which follow the prompt."""
    c = max(1.0, tokens / budget)
    r = min(0.2 + 0.06 * math.log2(c), 0.8)
    capacity = int(tokens / c**r)
    capacity = max(capacity, min(2 * new, tokens))
    prompt = min(max(capacity - new, window), tokens - new)
    left = prompt + new
    if left <= budget:
        return Split(prompt, 1, dim, left)
    ratio = Fraction(left, budget)
    page = math.ceil(math.sqrt(ratio))
    page = page if page <= ratio else 1
    return Split(prompt, page, max(int(dim * page / ratio), 1), budget // 2)


class RocketHead:
    """One KV head: the tokens that are left, with rotated keys."""

    def __init__(self, sizes: Split) -> None:
        self.sizes = sizes
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def chosen(self, queries: np.ndarray) -> list[int]:
        """Which tokens the rotated queries [G, H] of a group read."""
        dim, n, page = queries.shape[1], len(self.keys), self.sizes.page
        channels = highest(np.abs(queries).sum(axis=0), range(dim), self.sizes.channels)
        approximate = []
        for q in queries:
            scale = np.sqrt(dim * np.abs(q[channels]).sum() / np.abs(q).sum())
            logits = []
            for token in range(n):
                keys = np.stack(self.keys[token // page * page : min((token // page + 1) * page, n)])
                up = queries[:, channels].sum(axis=0) > 0
                bound = np.where(up, keys.max(axis=0)[channels], keys.min(axis=0)[channels])
                logits.append(q[channels] @ bound / scale)
            approximate.append(softmax(np.asarray(logits)))
        return highest(np.mean(approximate, axis=0), range(n), self.sizes.read)

    def attend(self, queries: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """What a group's rotated queries [G, H] get [G, H], and the tokens that they read."""
        read = self.chosen(queries)
        k, v = (np.stack([x[token] for token in read]) for x in (self.keys, self.values))
        return np.stack([softmax(k @ q / np.sqrt(len(q))) @ v for q in queries]), read
