"""Makes profiles for every method that uses one: `make_profile` from text files, `profile` from tokens."""

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
    """How to make a method's profile.

    Attributes:
        settings: type of the method's settings.
        find: maps model, samples, settings and progress to the contents of a profile, as for `profile.of`.
        profile: type of the profile.
        tokens: maps model, files, count and length to samples and their description.
        samples: default number of samples.

    Example:
        >>> from kvjax.calibration.make_profile import METHODS
        >>> {name: method.samples for name, method in METHODS.items() if not method.reads_text}
        {'razorattention': 1}
    """

    settings: type[Any]
    find: Callable[..., Any]
    profile: type[Profile] = HeadProfile
    tokens: Callable[[Params, Sequence[Path], int, int], tuple[np.ndarray, str]] = cut
    samples: int = 16

    @property
    def reads_text(self) -> bool:
        """Whether the method needs text files."""
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
"""Calibrations by the name of their policy. razorattention is another way to calibrate duoattention."""


def make_profile(
    params: Params,
    method: str,
    files: Sequence[Path] = (),
    settings: Any = None,
    samples: int | None = None,
    length: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Calibrate a method for a model.

    Args:
        params: the model.
        method: a key of `METHODS`.
        files: plain text files to sample.
        settings: the method's `Settings`; its defaults if None.
        samples, length: number of samples of text or random tokens (by default the method's), and their length in
            tokens.
        progress: called with the number of finished samples and of all samples.

    Returns:
        The profile.

    Raises:
        ValueError: the method is unknown, or the text is too short.
        OSError: a file cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> from kvjax.calibration.make_profile import make_profile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "book.txt")
        ...     _ = file.write_text("Call me Ishmael. " * 10)
        ...     made = make_profile(chat, "triattention", [file], samples=2, length=32)
        >>> made.method, len(made.queries)  # layers
        ('triattention', 2)
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
    """Like `make_profile`, for samples that are already tokenised.

    Args:
        params: the model.
        method: a key of `METHODS`.
        samples: token ids of the samples.
        data: description of the samples for readers.
        settings: the method's `Settings`; its defaults if None.
        progress: called with the number of finished samples and of all samples.

    Example:
        >>> from kvjax.calibration.make_profile import profile
        >>> samples = np.tile([5, 9, 2, 7], (2, 8))  # samples, tokens
        >>> made = profile(params, "triattention", samples, "a repeated phrase")
        >>> made.method, len(made.queries)  # layers
        ('triattention', 2)
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
        raise ValueError(f"there is no calibration for {name!r}; give one of {', '.join(METHODS)}")
    return METHODS[name]
