"""What conversion raises when a checkpoint cannot be trusted or understood."""

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, unsafe or of an unknown kind; the message names file, tensor and expectation."""


def listed(names: Iterable[str], most: int = 3) -> str:
    """A few names for an error message: ``a, b, c and 7 more``."""
    names = sorted(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
