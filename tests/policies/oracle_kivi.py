"""KIVI, literally: quantisation by group in NumPy, and one KV head's cache as lists. Written for reading."""

import numpy as np
from policies.driver import ROPE, rotate, softmax


def rounded(group: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of one group as they come back from 2^bits evenly spaced levels."""
    zero, scale = group.min(), (group.max() - group.min()) / (2**bits - 1)
    return zero + scale * np.round((group - zero) / scale) if scale > 0 else group


def keys_back(keys: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Keys [n, H], each channel of `group` tokens quantised together."""
    back = keys.copy()
    for start in range(0, len(keys), group):
        for channel in range(keys.shape[1]):
            back[start : start + group, channel] = rounded(keys[start : start + group, channel], bits)
    return back


def value_back(value: np.ndarray, bits: int, group: int) -> np.ndarray:
    """One value [H], `group` channels quantised together."""
    return np.concatenate([rounded(value[i : i + group], bits) for i in range(0, len(value), group)])


class KiviHead:
    """One KV head: exact keys and values of all tokens held, and their positions."""

    def __init__(self, bits: int, group: int, channels: int, residual: int) -> None:
        self.bits, self.group, self.channels, self.residual = bits, group, channels, residual
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """One more token."""
        self.keys.append(rotate(ROPE, k, pos))
        self.values.append(v.astype(np.float64))

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as attention reads them."""
        n = len(self.keys)
        packed = n - n % self.residual
        keys, values = np.stack(self.keys), np.stack(self.values)
        keys[:packed] = keys_back(keys[:packed], self.bits, self.group)
        for i in range(max(n - self.residual, 0)):
            values[i] = value_back(values[i], self.bits, self.channels)
        return keys, values

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H]."""
        keys, values = self.held()
        return np.stack([softmax(keys @ rotate(ROPE, q, pos) / np.sqrt(len(q))) @ values for q in queries])
