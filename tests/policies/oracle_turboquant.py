"""TurboQuant, literally: one vector's codes in NumPy loops, float64, and one KV head's cache as lists. Written for reading."""

import math

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares
from policies.oracle_fp8 import nearest
from policies.oracle_kivi import value_back

FACTS = {
    "turboquant": Facts(
        published={
            "bits": 4,
            "values": "levels",
            "signs": None,
            "exact_layers": 2,
            "keys": "rotated",
            "value_bits": None,
        },
        least={"group": 1, "exact_layers": 0},
        golden={"exact_layers": 0, "group": 8},
        tier="long",
    ),
}

LEVELS = {
    1: [0.7979],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
"""The positive half of the levels, as Max (1960) tabulates them for N(0, 1)."""

ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}
"""Mean square error of a number of N(0, 1), likewise."""


def hadamard(d: int) -> np.ndarray:
    """Entry i, j is -1 where i and j share an odd number of bits."""
    return np.asarray([[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)]) / math.sqrt(d)


def back(x: np.ndarray, levels: np.ndarray, rotation: np.ndarray, *, corrected: bool = True) -> np.ndarray:
    """A vector as it comes back from its codes."""
    length = np.sqrt((x**2).sum())
    if length == 0:
        return x
    coordinates = rotation @ x / length
    scaled = levels / math.sqrt(len(x))
    code = scaled[np.abs(scaled - coordinates[:, None]).argmin(axis=1)]
    return length * rotation.T @ code / (np.sqrt((code**2).sum()) if corrected else 1.0)


class TurboHead:
    """One KV head: keys and values of all tokens held, as they come back; the newest exact.

    Keys without levels are 8-bit floats.
    """

    def __init__(
        self,
        levels: np.ndarray | None,
        value_bits: int,
        value_levels: np.ndarray,
        rotation: np.ndarray,
        channels: int | None,
    ) -> None:
        self.levels, self.value_bits, self.value_levels = levels, value_bits, value_levels
        self.rotation, self.channels = rotation, channels
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """One more token, exact as yet."""
        self.keys.append(rotate(ROPE, k, pos))
        self.values.append(v.astype(np.float64))

    def code(self) -> None:
        """The newest token in its codes."""
        key, value = self.keys[-1], self.values[-1]
        self.keys[-1] = nearest(key) if self.levels is None else back(key, self.levels, self.rotation)
        if self.channels is None:
            self.values[-1] = back(value, self.value_levels, self.rotation)
        else:
            self.values[-1] = value_back(value, self.value_bits, self.channels)

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H]."""
        keys, values = np.stack(self.keys), np.stack(self.values)
        return shares(rotate(ROPE, queries, pos) @ keys.T / np.sqrt(keys.shape[-1])) @ values
