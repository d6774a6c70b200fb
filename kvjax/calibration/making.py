"""One way to make a profile for every method that has one: `make_profile`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.models import Params
from kvjax.policies.profile import HeadProfile

from . import catekv, chelsea
from .recording import cut

METHODS: Mapping[str, ModuleType] = {"catekv": catekv, "chelsea": chelsea}
"""What calibrates for a policy: a module with `Settings` and `profile`."""


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
    if method not in METHODS:
        raise ValueError(f"there is no calibration for {method!r}; there is for {', '.join(METHODS)}")
    module = METHODS[method]
    pieces, data = cut(params, files, samples, length)
    return module.profile(params, pieces, data, module.Settings() if settings is None else settings, progress)
