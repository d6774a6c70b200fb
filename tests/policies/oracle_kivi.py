"""KIVI, literally: quantisation by group in NumPy, and one KV head's cache as lists. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares

FACTS = {
    "kivi": Facts(published={"bits": 2, "group": 32, "residual": 32}, golden={"bits": 4, "group": 4, "residual": 8}),
}


def rounded(group: np.ndarray, bits: int, axis: int | None = None) -> np.ndarray:
    """Numbers of one group, or of each group along an axis, as they come back from 2^bits evenly spaced levels."""
    zero = group.min(axis=axis, keepdims=True)
    scale = (group.max(axis=axis, keepdims=True) - zero) / (2**bits - 1)
    return np.where(scale > 0, zero + scale * np.round((group - zero) / np.where(scale > 0, scale, 1)), group)


def keys_back(keys: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Keys [n, H], each channel of `group` tokens quantised together."""
    back = keys.copy()
    for start in range(0, len(keys), group):
        back[start : start + group] = rounded(keys[start : start + group], bits, axis=0)
    return back


def value_back(value: np.ndarray, bits: int, group: int) -> np.ndarray:
    """One value [H], `group` channels quantised together."""
    return np.concatenate([rounded(value[i : i + group], bits) for i in range(0, len(value), group)])


class KiviHead:
    """One KV head: keys and values of all tokens held, exact until they are packed, in the order of the published code."""

    def __init__(self, bits: int, group: int, channels: int, residual: int) -> None:
        self.bits, self.group, self.channels, self.residual = bits, group, channels, residual
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.packed_keys = self.packed_values = 0

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """One more token."""
        self.keys.append(rotate(ROPE, k, pos))
        self.values.append(v.astype(np.float64))

    def pack(self) -> None:
        """After the prompt, and after every step's attention: whole residuals of keys, and values but for the residual."""
        whole = len(self.keys) // self.residual * self.residual
        if whole > self.packed_keys:
            new = np.stack(self.keys[self.packed_keys : whole])
            self.keys[self.packed_keys : whole] = keys_back(new, self.bits, self.group)
            self.packed_keys = whole
        for i in range(self.packed_values, len(self.values) - self.residual):
            self.values[i] = value_back(self.values[i], self.bits, self.channels)
            self.packed_values = i + 1

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H]."""
        keys, values = np.stack(self.keys), np.stack(self.values)
        return shares(rotate(ROPE, queries, pos) @ keys.T / np.sqrt(keys.shape[-1])) @ values
