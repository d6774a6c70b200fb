"""`CheckpointError`, and helpers that shorten names and values for error messages."""

import reprlib
from collections.abc import Iterable
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, unsafe or of an unknown kind. The message names file, tensor and
    expectation.
    """


def listed(names: Iterable[str], most: int = 3) -> str:
    """Join a few names for an error message: ``a, b, c and 7 more``."""
    names = sorted(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def told(error: BaseException) -> str:
    """First line of an error's message, at most 300 characters."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 300 else f"{line[:300]}…"


def shortened(value: Any) -> str:
    """Short `repr` of a value of any size or nesting, for an error message."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
