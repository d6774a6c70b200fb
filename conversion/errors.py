"""What conversion raises when a checkpoint cannot be trusted or understood."""

import reprlib
from collections.abc import Iterable
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, unsafe or of an unknown kind; the message names file, tensor and expectation."""


def listed(names: Iterable[str], most: int = 3) -> str:
    """A few names for an error message: ``a, b, c and 7 more``."""
    names = sorted(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def told(error: BaseException) -> str:
    """What a library says of a file, in one short line."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 300 else f"{line[:300]}…"


def shortened(value: Any) -> str:
    """A value for an error message, however large or deeply nested it is."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
