"""ClusterKV, literally: sections III and IV-C of the paper in NumPy and lists, for one KV head. Written for reading."""

from collections.abc import Sequence

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, softmax

FACTS = {
    "clusterkv": Facts(
        published={
            "sinks": 16,
            "dense_layers": 2,
            "tokens_per_cluster": 80,
            "window": 320,
            "new_clusters": 4,
            "iterations": 20,
        },
        least={
            "sinks": 0,
            "dense_layers": 0,
            "tokens_per_cluster": 1,
            "n_clusters": 1,
            "iterations": 1,
            "window": 1,
            "new_clusters": 1,
        },
        budgets=(({"sinks": 16}, 17),),
        small={"n_clusters": 5},
        bounds=("tokens_per_cluster",),
        golden={"budget": 12, "sinks": 2, "dense_layers": 1, "n_clusters": 5, "window": 4, "new_clusters": 2},
    ),
}


def nearness(x: np.ndarray, centroids: np.ndarray, distance: str) -> np.ndarray:
    """How near each key [T, H] is to each centroid [M, H]: larger is nearer."""
    if distance == "l2":
        return -np.sum((x[:, None] - centroids) ** 2, axis=-1)
    products = x @ centroids.T
    if distance == "ip":
        return products
    lengths = np.linalg.norm(centroids, axis=-1)
    return np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1), 0) / np.linalg.norm(x, axis=-1)[:, None]


def kmeans(x: np.ndarray, init: np.ndarray, iterations: int, distance: str) -> tuple[np.ndarray, list[int]]:
    """Centroids [M, H], and the label of each of the keys x [T, H]."""
    centroids = init.astype(np.float64).copy()

    def assign() -> list[int]:
        return nearness(x, centroids, distance).argmax(axis=1).tolist() if len(x) else []

    for _ in range(iterations):
        labels = assign()
        for c in set(labels):  # a cluster without keys keeps its centroid
            centroids[c] = x[np.asarray(labels) == c].mean(axis=0)
    return centroids, assign()


def select(query: np.ndarray, centroids: np.ndarray, clusters: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Tokens of the clusters that a query likes best, best cluster first, the last one cut to fit the budget."""
    chosen: list[int] = []
    for c in np.argsort(-(centroids @ query), kind="stable"):
        chosen += clusters[c]
        if len(chosen) >= budget:
            break
    return chosen[:budget]


class ClusterHead:
    """One KV head: all its keys and values, and clusters of token positions.

    Attributes:
        order: for any positions, the order in which k-means takes them for its first centroids.
    """

    def __init__(self, policy, order) -> None:
        self.policy, self.order = policy, order
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.centroids = np.zeros((0, len(ROPE.inv_freq) * 2))
        self.clusters: list[list[int]] = []
        self.tail: list[int] = []

    def prefill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take in a prompt: keys and values [n, H]."""
        for k, v in zip(keys, values, strict=True):
            self.add(k, v)
        p = self.policy
        wanted = p.n_clusters or max(1, len(keys) // p.tokens_per_cluster)
        self.group(min(wanted, len(self.tail)))

    def add(self, k: np.ndarray, v: np.ndarray) -> None:
        pos = len(self.keys)
        self.keys.append(rotate(ROPE, k, pos))
        self.values.append(v.astype(np.float64))
        if pos >= self.policy.sinks:
            self.tail.append(pos)

    def group(self, count: int) -> None:
        """Turn the tail into `count` clusters."""
        if self.tail:
            x = np.stack([self.keys[pos] for pos in self.tail])
            first = [self.keys[self.tail[i]] for i in self.order(self.tail)[:count]]
            centroids, labels = kmeans(x, np.stack(first), self.policy.iterations, self.policy.distance)
            self.centroids = np.concatenate([self.centroids, centroids])
            for c in range(count):
                self.clusters.append([pos for pos, label in zip(self.tail, labels, strict=True) if label == c])
        self.tail = []

    def step(self, queries: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int) -> tuple[np.ndarray, list[list[int]]]:
        """Append a token and attend with the group's queries [G, H]: the output [G, H], and what each query selected."""
        p = self.policy
        self.add(k, v)
        turned = rotate(ROPE, queries, pos)
        liking = np.repeat(turned.mean(axis=0)[None], len(turned), axis=0) if p.gqa == "mean" else turned
        outputs, selected = [], []
        for query, wish in zip(turned, liking, strict=True):
            chosen = select(wish, self.centroids, self.clusters, p.budget - p.sinks)
            read = [*range(min(p.sinks, pos + 1)), *chosen, *self.tail]
            probs = softmax(np.stack([self.keys[i] for i in read]) @ query / np.sqrt(len(query)))
            outputs.append(probs @ np.stack([self.values[i] for i in read]))
            selected.append(chosen)
        if p.cluster_decode and len(self.tail) == p.window:
            self.group(min(p.new_clusters, p.window))
        return np.stack(outputs), selected
