"""Validates command-line values before anything is loaded."""

import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from kvjax._util.settings import MAX_INT as MAX_INT

T = TypeVar("T", int, float)


def listed(text: str, option: str) -> list[str]:
    """Split names separated by commas."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{text!r}: give names separated by commas, none of them empty", param_hint=option)
    once(names, option)
    return names


def numbers(text: str, kind: Callable[[str], T], option: str, allowed: str, test: Callable[[T], bool]) -> tuple[T, ...]:
    """Parse numbers separated by commas.

    Args:
        text: the value.
        kind: converts one number.
        option: the option's name.
        allowed: description of the numbers that pass `test`, for the message.
        test: whether a number is allowed.
    """
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers separated by commas", param_hint=option) from None
    for value in found:
        if not (math.isfinite(value) and test(value)):
            raise typer.BadParameter(f"{value}: give {allowed}", param_hint=option)
    once(found, option)
    return found


def positive(value: float | None, option: str) -> None:
    """Raise unless the number, if given, is finite and above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value}: give a number above 0", param_hint=option)


def once(values: Sequence[object], option: str) -> None:
    """Raise if a value is listed twice."""
    again = [value for i, value in enumerate(values) if value in values[:i]]
    if again:
        raise typer.BadParameter(f"{again[0]} is there twice", param_hint=option)


def picture(path: Path | None) -> None:
    """Raise unless a picture can be drawn and written to this file, if it is given.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not support the format of this name.
        OSError: as `destination`.
    """
    if path is None:
        return
    from kvjax.plots import check_format

    check_format(path)
    destination(path)


def destination(path: Path | None, folder: bool = False) -> None:
    """Raise unless a file can be written here, or with `folder` a folder with files.

    Raises:
        OSError: something else is at the path, or its parent is not a writable folder.
    """
    if path is None:
        return
    if path.exists():
        mode = path.stat().st_mode
        if folder and not stat.S_ISDIR(mode):
            raise NotADirectoryError(f"{path} is there, but is not a folder; give another path")
        if not folder and stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder; give the path of a file")
        if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
            raise FileExistsError(f"{path} is there, but is not a file; give another path")
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable; give another path")
        return
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {above} is not a folder")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{path} cannot be written: the folder {above} is not writable")


def check_temperature(temperature: float) -> None:
    """Raise `ValueError` if a temperature is below 0, is not a number, or overflows float32."""
    if not 0 <= temperature <= 1e38:
        raise ValueError(f"temperature={temperature}; give 0 (greedy) or more")
