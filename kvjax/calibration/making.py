"""One way to make a profile for every method that has one: `make_profile` from text, `profile` from tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.models import Params
from kvjax.policies.profile import HeadProfile, fingerprint, rows

from . import catekv, chelsea, duoattention
from .recording import cut

METHODS: Mapping[str, ModuleType] = {"catekv": catekv, "chelsea": chelsea, "duoattention": duoattention}
"""What calibrates for a policy: a module with `Settings` and `scores_and_labels`."""


def make_profile(
    params: Params,
    method: str,
    files: Sequence[Path],
    settings: Any = None,
    samples: int = 16,
    length: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> HeadProfile:
    """Find out what a method wants to know of a model's heads.

    Args:
        method: a key of `METHODS`.
        files: plain text to read.
        settings: the method's `Settings`; by default its own.
        samples, length: how many pieces of text, and their length in tokens.
        progress: called with samples read and in all.

    Raises:
        ValueError: there is no such method, or the text is too short.
        OSError: a file cannot be read.
    """
    pieces, data = cut(params, files, samples, length)
    return profile(params, method, pieces, data, settings, progress)


def profile(
    params: Params,
    method: str,
    samples: Int[np.ndarray, "S T"],
    data: str,
    settings: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeadProfile:
    """`make_profile` from samples that are tokens already.

    Args:
        data: what the samples are, for people.
    """
    if method not in METHODS:
        raise ValueError(f"there is no calibration for {method!r}; there is for {', '.join(METHODS)}")
    settings = METHODS[method].Settings() if settings is None else settings
    scores, labels = METHODS[method].scores_and_labels(params, samples, settings, progress)
    return HeadProfile(
        method=method,
        model=fingerprint(params.config),
        data=data,
        settings=tuple(dataclasses.asdict(settings).items()),
        scores=rows(np.round(scores.astype(float), 4).tolist()),
        labels=labels,
    )
