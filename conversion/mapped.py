"""Parts of arrays in files by memory maps: of a file only the pages are read that a part lies on."""

from pathlib import Path
from typing import Any

import numpy as np


def mapped(
    file: Path, dtype: Any, offset: int, shape: tuple[int, ...], rows: slice | np.ndarray, columns: slice = slice(None)
) -> np.ndarray:
    """A part of an array, which is not read before it is looked at. The map is its own: pages leave memory with it.

    Args:
        file: that holds the array as it is in memory.
        dtype, offset, shape: of the array, whose first byte is at `offset`.
        rows: a range of the first axis, or numbers of rows, which are read at once.
        columns: a range of the last axis, of arrays that have more than one.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    stored = np.memmap(file, dtype, mode="r", offset=offset, shape=shape)
    part = np.asarray(stored)[rows]
    return part if len(shape) == 1 else part[..., columns]
