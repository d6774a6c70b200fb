"""Reads the small files of a checkpoint. Opening them cannot block, and reading them cannot exhaust memory."""

import collections
import json
from pathlib import Path
from typing import Any

from kvjax._util import user_files

from .errors import CheckpointError, listed, told

_MOST_BYTES = 1 << 26
"""Limit on the size of a text file, in bytes. The largest known tokenizers have half of it."""


def present(path: Path) -> bool:
    """Whether a file exists.

    Raises:
        CheckpointError: the path is not a regular file (opening a pipe could block), or cannot be inspected.
    """
    try:
        user_files.size(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except user_files.NotRegularError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: {path.name!r} cannot be read ({error})") from error
    return True


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        CheckpointError: the file is missing, not a regular file, too large or not UTF-8.
    """
    if not present(path):
        raise CheckpointError(f"{path.parent}: no {path.name} there")
    try:
        return user_files.read_text(path, _MOST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # its message names the path
        raise CheckpointError(str(error)) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        CheckpointError: as `read_text`, or the file is not valid JSON, not an object, or has a duplicate key.
    """
    try:
        text = read_text(path)
        value = json.loads(text, object_pairs_hook=unique)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # includes integers of thousands of digits, and too deep nesting
        raise CheckpointError(f"{path}: not valid JSON ({told(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object was expected, got {type(value).__name__}")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs, for `json.loads`. Raises ValueError if a key occurs twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {listed(key for key, count in counts.items() if count > 1)}")
    return entries
