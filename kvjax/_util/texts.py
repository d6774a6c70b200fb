"""Reads text files."""

from pathlib import Path

from . import user_files


def read_text(path: Path) -> str:
    """Read a plain text file in UTF-8.

    Raises:
        ValueError: the file is too large, not UTF-8, contains zero bytes, or has only white space.
        OSError: the file does not exist, is not a regular file, or cannot be read.
    """
    text = user_files.read_text(path)
    if "\0" in text:
        raise ValueError(f"{path}: not text (a zero byte at character {text.index(chr(0))})")
    if not text.strip():
        raise ValueError(f"{path}: no text in it; give a file that has some")
    return text
