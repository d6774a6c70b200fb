"""Reads files that users name. `~` is expanded, and only regular files that fit in memory are read.

Opening a pipe can block, and reading a device can fill the memory. Both are refused before they are opened.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

TEXT_BYTES = 1 << 24
"""Limit on the bytes of a text file, including prompts, beyond any context length. A tokenizer needs 100 to 400 times as much memory."""

DATA_BYTES = 1 << 26
"""Limit on the bytes of a JSON file, beyond any benchmark's questions. Python objects take up to 25 times as much memory."""


class NotRegularError(OSError):
    """A path is not a regular file."""


def expanded(path: str | Path) -> Path:
    """Expand `~` and `~user` at the beginning of a path. For an unknown user, the path is returned unchanged."""
    return Path(os.path.expanduser(path))


def size(path: str | Path) -> int:
    """Size of a regular file in bytes.

    Raises:
        NotRegularError: the path is a directory, a pipe, a socket or a device.
        OSError: the file does not exist.
    """
    path = expanded(path)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "pipe, socket or device"
        raise NotRegularError(errno.EINVAL, f"a regular file was expected, not a {kind}", str(path))
    return found.st_size


def check(path: str | Path, most_bytes: int) -> Path:
    """Expand the path of a file to read, and validate it.

    Raises:
        OSError: as `size`.
        ValueError: the file has more than `most_bytes` bytes.
    """
    if (found := size(path)) > most_bytes:
        raise ValueError(f"{expanded(path)}: {found} bytes; files of at most {most_bytes} bytes are read here")
    return expanded(path)


def opened(path: str | Path, most_bytes: int) -> BinaryIO:
    """Open a file for reading. Never blocks, even if a pipe has replaced the file.

    Raises:
        OSError, ValueError: as `check`, or the file cannot be read.
    """
    return open(check(path, most_bytes), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_bytes(path: str | Path, most_bytes: int = DATA_BYTES) -> bytes:
    """Read the contents of a file.

    Raises:
        OSError, ValueError: as `check`, or the file cannot be read.
    """
    with opened(path, most_bytes) as stream:
        # Files of the kernel may have more bytes than their size, or block; then nothing is returned.
        try:
            content: bytes = stream.read(most_bytes + 1) or b""
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    if len(content) > most_bytes:
        raise ValueError(f"{expanded(path)}: more than {most_bytes} bytes; files of at most that many are read here")
    return content


def read_text(path: str | Path, most_bytes: int = TEXT_BYTES) -> str:
    r"""Read a text file in UTF-8. "\r\n" and "\r" become "\n".

    Raises:
        OSError, ValueError: as `read_bytes`, or the file is not UTF-8.
    """
    content = read_bytes(path, most_bytes)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{expanded(path)}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return io.StringIO(text, newline=None).read()
