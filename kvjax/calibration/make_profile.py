"""One way to make a profile for every method that has one: `make_profile` from text, `profile` from tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.models import Params
from kvjax.policies.families.skewing import SkewProfile
from kvjax.policies.families.trigonometry import MeanQueries
from kvjax.policies.profile import HeadProfile, Profile, fingerprint

from . import catekv, chelsea, duoattention, infinigen, razorattention, triattention
from .recording import cut


@dataclasses.dataclass(frozen=True)
class Method:
    """What makes a method's profile.

    Attributes:
        settings: type of what can be set.
        find: from model, samples, settings and progress to what `profile.of` takes.
        profile: kind of profile.
        tokens: from model, files, count and length to samples and a line that says what they are.
        samples: how many there are if nothing is said.
    """

    settings: type[Any]
    find: Callable[..., Any]
    profile: type[Profile] = HeadProfile
    tokens: Callable[[Params, Sequence[Path], int, int], tuple[np.ndarray, str]] = cut
    samples: int = 16

    @property
    def reads_text(self) -> bool:
        """Whether it wants files."""
        return self.tokens is cut


METHODS: Mapping[str, Method] = {
    "catekv": Method(catekv.Settings, catekv.scores_and_labels),
    "chelsea": Method(chelsea.Settings, chelsea.scores_and_labels),
    "duoattention": Method(duoattention.Settings, duoattention.scores_and_labels),
    "infinigen": Method(infinigen.Settings, infinigen.skewing_matrices, SkewProfile),
    "razorattention": Method(
        razorattention.Settings,
        razorattention.scores_and_labels,
        tokens=razorattention.random_tokens,
        samples=1,
    ),
    "triattention": Method(triattention.Settings, triattention.mean_queries, MeanQueries),
}
"""What calibrates for a policy, or in another's way (razorattention, for duoattention)."""


def make_profile(
    params: Params,
    method: str,
    files: Sequence[Path] = (),
    settings: Any = None,
    samples: int | None = None,
    length: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Find out what a method wants to know of a model's heads.

    Args:
        method: a key of `METHODS`.
        files: plain text to read.
        settings: the method's `Settings`; by default its own.
        samples, length: how many pieces of text or of random tokens, by default as the method has it, and their length in tokens.
        progress: called with samples read and in all.

    Raises:
        ValueError: there is no such method, or the text is too short.
        OSError: a file cannot be read.
    """
    made = _method(method)
    pieces, data = made.tokens(params, files, made.samples if samples is None else samples, length)
    return profile(params, method, pieces, data, settings, progress)


def profile(
    params: Params,
    method: str,
    samples: Int[np.ndarray, "S T"],
    data: str,
    settings: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """`make_profile` from samples that are tokens already.

    Args:
        data: what the samples are, for people.
    """
    made = _method(method)
    settings = made.settings() if settings is None else settings
    return made.profile.of(
        made.find(params, samples, settings, progress),
        method=method,
        model=fingerprint(params.config),
        data=data,
        settings=tuple(dataclasses.asdict(settings).items()),
    )


def _method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"there is no calibration for {name!r}; there is for {', '.join(METHODS)}")
    return METHODS[name]
