"""ClusterKV, literally: sections III and IV-C of the paper in NumPy and lists, for one KV head. Written for reading."""

from collections.abc import Sequence

import numpy as np
from policies.driver import ROPE, rotate, softmax


def nearness(x: np.ndarray, centroid: np.ndarray, distance: str) -> float:
    """How near a key is to a centroid: larger is nearer."""
    if distance == "cosine":
        length = np.linalg.norm(centroid)
        return float(x @ centroid / (np.linalg.norm(x) * length)) if length > 0 else 0.0
    return float(x @ centroid if distance == "ip" else -np.sum((x - centroid) ** 2))


def kmeans(x: np.ndarray, init: np.ndarray, iterations: int, distance: str) -> tuple[np.ndarray, list[int]]:
    """Centroids [M, H], and the label of each of the keys x [T, H]."""
    centroids = init.astype(np.float64).copy()

    def assign() -> list[int]:
        return [int(np.argmax([nearness(key, c, distance) for c in centroids])) for key in x]

    for _ in range(iterations):
        labels = assign()
        for c in set(labels):  # a cluster without keys keeps its centroid
            centroids[c] = np.mean([key for key, label in zip(x, labels, strict=True) if label == c], axis=0)
    return centroids, assign()


def select(query: np.ndarray, centroids: np.ndarray, clusters: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Tokens of the clusters that a query likes best, best cluster first, the last one cut to fit the budget."""
    chosen: list[int] = []
    for c in sorted(range(len(clusters)), key=lambda c: -(query @ centroids[c])):
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
        turned = np.stack([rotate(ROPE, q, pos) for q in queries])
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
