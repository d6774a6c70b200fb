"""What the literal algorithms have in common, in NumPy, float64: rotary embedding, softmax, and choosing the highest scores."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvjax.config import Rope, RopeConfig
from kvjax.pallas_kernels.ties import NEAR

ROPE = RopeConfig(theta=100.0, dim=8).resolve(1)


def rotate(rope: Rope, x: np.ndarray, pos: Any) -> np.ndarray:
    """As `driver.rotate`, of vectors x [..., H] at positions that broadcast against the axes before H."""
    half = len(rope.inv_freq)
    angle = np.asarray(pos)[..., None] * np.asarray(rope.inv_freq)
    c, s, x = np.cos(angle), np.sin(angle), np.asarray(x, np.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * c - second * s, second * c + first * s, x[..., 2 * half :]], axis=-1)


def shares(logits: np.ndarray, visible: np.ndarray | bool = True) -> np.ndarray:
    """Softmax along the last axis over what is visible; rows that see nothing have zeros."""
    masked = np.where(visible, logits, -np.inf)
    top = masked.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(masked - np.where(np.isneginf(top), 0, top))
    return e / np.maximum(e.sum(axis=-1, keepdims=True), np.finfo(float).tiny)


def highest(scores: Any, among: Iterable[int], count: int) -> list[int]:
    """The `count` best of these places; what is within rounding of the last one equals it, and of equals the first are taken."""
    places = sorted(among)
    best = sorted(places, key=lambda place: -scores[place])[: max(count, 0)]
    if not best:
        return []
    last = scores[best[-1]]
    equal = [place for place in places if abs(scores[place] - last) <= NEAR * np.spacing(np.float32(abs(last)))]
    above = [place for place in best if place not in equal]
    return above + equal[: len(best) - len(above)]


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax of one row of logits."""
    e = np.exp(x - x.max())
    return e / e.sum()
