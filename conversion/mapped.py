"""Reads parts of arrays in files through memory maps, so that only the pages of a part are read."""

from pathlib import Path
from typing import Any

import numpy as np


def mapped(
    file: Path, dtype: Any, offset: int, shape: tuple[int, ...], rows: slice | np.ndarray, columns: slice = slice(None)
) -> np.ndarray:
    """Map a part of an array in a file. It is read on access, and its pages are freed with it.

    Args:
        file: file that contains the array in its in-memory layout.
        dtype, shape: type and shape of the whole array.
        offset: position of the array's first byte.
        rows: range of the first axis, or indices of rows. Indexed rows are read at once.
        columns: range of the last axis. Ignored for arrays with one axis.

    Raises:
        ValueError: the file is too short.
        OSError: the file cannot be read.
    """
    stored = np.memmap(file, dtype, mode="r", offset=offset, shape=shape)
    part = np.asarray(stored)[rows]
    return part if len(shape) == 1 else part[..., columns]
