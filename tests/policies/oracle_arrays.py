"""What the literal algorithms do with many vectors at once, in NumPy, float64: rotary embedding, and shares of attention."""

from typing import Any

import numpy as np

from kvjax.config import Rope


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
