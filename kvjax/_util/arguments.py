"""Arguments as people pass them: numbers of Python, NumPy or JAX made plain, and values shown in errors."""

import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def plain(value: Any) -> Any:
    """Python's number for a scalar of NumPy or JAX, or for an array of no dimensions; anything else as it is.

    A float of fewer than 64 bits becomes the shortest decimal that rounds to it: `np.float32(0.2)` is 0.2, and not 0.20000000298.
    """
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or value.ndim:
        return value
    found = np.asarray(value)[()]
    return float(str(found)) if str(found.dtype) in ("float16", "float32") else found.item()


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, `least` or more.

    Raises:
        ValueError: it is none.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or (least is not None and found < least):
        raise ValueError(f"{name}={short(found)}; give a whole number{'' if least is None else f', {least} or more'}")
    return found


MOST = 2**30
"""Of tokens and rows: positions are 32-bit numbers, and sizes are rounded up."""


def amount(name: str, value: Any, least: int = 1) -> int:
    """A number of tokens or rows, from `least` to `MOST`.

    Raises:
        ValueError: it is none.
    """
    found = whole(name, value, least)
    if found > MOST:
        raise ValueError(f"{name}={short(found)}; give a whole number from {least} to {MOST}")
    return found


def wholes(name: str, values: Any, count: int | None, least: int | None = None) -> list[int]:
    """A list of `count` whole numbers, or of any number of them, each `least` or more.

    Raises:
        ValueError: it is none.
    """
    if isinstance(values, np.ndarray | jax.Array) and values.ndim == 1:
        values = np.asarray(values).tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != (count or len(values)):
        what = "of whole numbers" if count is None else f"of {count}, one for each row"
        raise ValueError(f"{name} is {shown(values)}; give a list {what}")
    return [whole(f"{name}[{i}]", value, least) for i, value in enumerate(values)]


def number(name: str, value: Any, ok: Callable[[float], bool], allowed: str) -> float:
    """A finite number that is `ok`.

    Raises:
        ValueError: it is none; the message says what is `allowed`.
    """
    found = plain(value)
    finite = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) <= sys.float_info.max
    if not finite or not ok(found):
        raise ValueError(f"{name}={short(found)}; give {allowed}")
    return float(found)


def shown(value: Any) -> str:
    """A value and its type, in a few words."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim:
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{short(value)} ({type(value).__name__})"


def short(value: Any, max_length: int = 60) -> str:
    """`repr`, of long values the beginning and the end: of lists a few items, of others `max_length` characters."""
    form = reprlib.Repr()
    form.maxstring = form.maxother = max_length
    return form.repr(value)
