"""The small files of a checkpoint: opened only where that cannot block, read only where that cannot fill memory."""

import collections
import json
from pathlib import Path
from typing import Any

from kvjax._util import user_files

from .errors import CheckpointError, listed, told

_MOST_BYTES = 1 << 26
"""Of a text file; the largest tokenizers known take half of it."""


def present(path: Path) -> bool:
    """Whether a file is there.

    Raises:
        CheckpointError: what is there is no regular file (to open a pipe may wait for ever), or cannot be asked.
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
    """The contents of a text file.

    Raises:
        CheckpointError: no such file, one of another kind, too large, or not UTF-8.
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
    """An object from a JSON file.

    Raises:
        CheckpointError: as `read_text`, not JSON, not an object, or a key twice.
    """
    try:
        text = read_text(path)
        value = json.loads(text, object_pairs_hook=unique)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and nesting without end
        raise CheckpointError(f"{path}: not valid JSON ({told(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object was expected, got {type(value).__name__}")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some pairs, for `json.loads`; ValueError if it has a key twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {listed(key for key, count in counts.items() if count > 1)}")
    return entries
