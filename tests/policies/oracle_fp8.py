"""FP8, literally: the nearest of all numbers of the format, and one KV head's cache as lists. Written for reading."""

import numpy as np
from policies.facts import Facts
from policies.oracle_arrays import ROPE, rotate, shares

FACTS = {"fp8": Facts(published={"exact_layers": 0}, least={"exact_layers": 0}, tier="slow")}

NUMBERS = np.asarray(
    [fraction / 8 * 2.0**-6 for fraction in range(8)]
    + [(1 + fraction / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for fraction in range(8)][:-1]
)
"""The numbers of e4m3 from 0 on, ascending: 8 subnormal ones, then 8 for each exponent. The last code is NaN's."""


def nearest(x: np.ndarray) -> np.ndarray:
    """One vector as it comes back: its largest number is 448 of its factor, ties go to the even code."""
    factor = np.float32(np.abs(x.astype(np.float32)).max()) / np.float32(448)
    if factor == 0:
        return np.zeros(len(x))
    found = np.zeros(len(x))
    for i, number in enumerate(x.astype(np.float32) / factor):
        distance = np.abs(NUMBERS - abs(float(number)))
        ties = np.flatnonzero(distance == distance.min())
        code = next((c for c in ties if c % 2 == 0), ties[0])
        found[i] = np.copysign(NUMBERS[code], number) * float(factor)
    return found


class Float8Head:
    """One KV head: keys and values of all tokens held, as they come back; the newest exact."""

    def __init__(self) -> None:
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def append(self, k: np.ndarray, v: np.ndarray, pos: int) -> None:
        """One more token, exact as yet."""
        self.keys.append(rotate(ROPE, k, pos))
        self.values.append(v.astype(np.float64))

    def code(self) -> None:
        """The newest token in 8-bit floats."""
        self.keys[-1], self.values[-1] = nearest(self.keys[-1]), nearest(self.values[-1])

    def attend(self, queries: np.ndarray, pos: int) -> np.ndarray:
        """Attention of a group's queries [G, H]."""
        keys, values = np.stack(self.keys), np.stack(self.values)
        return shares(rotate(ROPE, queries, pos) @ keys.T / np.sqrt(keys.shape[-1])) @ values
