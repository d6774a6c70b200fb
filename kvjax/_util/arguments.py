"""Validates arguments: converts numbers of Python, NumPy or JAX, and formats values for error messages."""

import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def plain(value: Any) -> Any:
    """Convert a scalar of NumPy or JAX, or an array without dimensions, to a Python number. Other values are returned unchanged.

    A float of fewer than 64 bits becomes the shortest decimal that rounds to it: `np.float32(0.2)` becomes 0.2 instead
    of 0.20000000298.
    """
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or value.ndim or _is_key(value):
        return value
    found = np.asarray(value)[()]
    return float(str(found)) if str(found.dtype) in ("float16", "float32") else found.item()


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Validate a whole number of at least `least`.

    Raises:
        ValueError: the value is not such a number.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or (least is not None and found < least):
        raise ValueError(f"{name}={short(found)}; give a whole number{'' if least is None else f', {least} or more'}")
    return found


MOST = 2**30
"""Maximum number of tokens or rows. Positions are 32-bit numbers, and sizes are rounded up."""


def amount(name: str, value: Any, least: int = 1) -> int:
    """Validate a number of tokens or rows, from `least` to `MOST`.

    Raises:
        ValueError: the value is not such a number.
    """
    found = whole(name, value, least)
    if found > MOST:
        raise ValueError(f"{name}={short(found)}; give a whole number from {least} to {MOST}")
    return found


def wholes(name: str, values: Any, count: int | None, least: int | None = None) -> list[int]:
    """Validate a list of `count` whole numbers (any number if None), each at least `least`.

    Raises:
        ValueError: the value is not such a list.
    """
    if isinstance(values, np.ndarray | jax.Array) and values.ndim == 1 and not _is_key(values):
        values = np.asarray(values).tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != (count or len(values)):
        what = "of whole numbers" if count is None else f"of {count}, one for each row"
        raise ValueError(f"{name} is {shown(values)}; give a list {what}")
    return [whole(f"{name}[{i}]", value, least) for i, value in enumerate(values)]


def number(name: str, value: Any, ok: Callable[[float], bool], allowed: str) -> float:
    """Validate a finite number for which `ok` is true.

    Raises:
        ValueError: the value is not such a number. The message ends with `allowed`, which describes allowed numbers.
    """
    found = plain(value)
    finite = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) <= sys.float_info.max
    if not finite or not ok(found):
        raise ValueError(f"{name}={short(found)}; give {allowed}")
    return float(found)


def _is_key(value: Any) -> bool:
    """Whether this is an array of random keys, which NumPy cannot read."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def shown(value: Any) -> str:
    """Describe a value and its type briefly."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim:
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{short(value)} ({type(value).__name__})"


def short(value: Any, max_length: int = 60) -> str:
    """`repr` with long values abbreviated: lists to a few items, other values to `max_length` characters."""
    if isinstance(value, jax.Array) and _is_key(value):
        return f"an array of random keys of shape {value.shape}" if value.ndim else "a random key"
    form = reprlib.Repr()
    form.maxstring = form.maxother = max_length
    return form.repr(value)
