"""Texts from files."""

from pathlib import Path


def read_text(path: Path) -> str:
    """A file of plain text in UTF-8.

    Raises:
        ValueError: it is not UTF-8, has zero bytes, as no text has, or has nothing but white space.
        OSError: it is not there, is a folder, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if "\0" in text:
        raise ValueError(f"{path}: not text (a zero byte at character {text.index(chr(0))})")
    if not text.strip():
        raise ValueError(f"{path}: no text in it; give a file that has some")
    return text
