"""Texts from files."""

from pathlib import Path

from . import user_files


def read_text(path: Path) -> str:
    """A file of plain text in UTF-8.

    Raises:
        ValueError: it is not UTF-8, has zero bytes, as no text has, or has nothing but white space, or it is too large.
        OSError: it is not there, is no regular file, or cannot be read.
    """
    text = user_files.read_text(path)
    if "\0" in text:
        raise ValueError(f"{path}: not text (a zero byte at character {text.index(chr(0))})")
    if not text.strip():
        raise ValueError(f"{path}: no text in it; give a file that has some")
    return text
