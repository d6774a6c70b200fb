"""Haystacks for needles: a sentence repeated, or any text split into sentences."""

import itertools
import random
import re
import uuid
from collections.abc import Sequence
from functools import cache

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The passkey task's noise (Mohtashami and Jaggi 2023, "Landmark Attention", section 4.2), which RULER repeats."""


@cache
def sentences(text: str) -> tuple[str, ...]:
    """A text's sentences, white space normalised.

    Raises:
        ValueError: the text has no sentence.
    """
    found = tuple(" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text) if part.strip())
    if not found:
        raise ValueError("the haystack is empty; give a text of some sentences")
    return found


def hide(hay: Sequence[str], needles: Sequence[str], depths: Sequence[float], separator: str) -> str:
    """The hay with needle i inserted after a fraction `depths[i]` of its units; needles at the same depth keep their order."""
    behind: dict[int, list[str]] = {}
    for needle, depth in zip(needles, depths, strict=True):
        behind.setdefault(round(depth * len(hay)), []).append(needle)
    pieces: list[str] = []
    for i in range(len(hay) + 1):
        pieces += behind.get(i, [])
        pieces += hay[i : i + 1]
    return separator.join(pieces)


def repeated(units: Sequence[str], count: int) -> list[str]:
    """`count` units, starting again from the first after the last one."""
    return list(itertools.islice(itertools.cycle(units), count))


def number(rng: random.Random, digits: int = 7) -> str:
    """A random number of `digits` digits; the first is not 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def seeded(*parts: object) -> random.Random:
    """A random generator seeded by these parts, the same on every machine."""
    return random.Random("/".join(map(str, parts)))
