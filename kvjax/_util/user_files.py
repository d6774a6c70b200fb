"""Files that users name: `~` is their home, and what is read is a regular file that fits in memory.

To open a pipe may wait forever, and to read a device may fill the memory. So both are refused before they are opened.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

TEXT_BYTES = 1 << 24
"""Of a plain text, prompts among them: more than any context window. A tokenizer takes 100 to 400 times as much memory."""

DATA_BYTES = 1 << 26
"""Of JSON: more than any benchmark's questions. Python's objects take up to 25 times as much memory."""


class NotRegularError(OSError):
    """A path is of something else than a regular file."""


def expanded(path: str | Path) -> Path:
    """The path, with `~` and `~user` at its beginning replaced by that home. An unknown user's stays as it is."""
    return Path(os.path.expanduser(path))


def size(path: str | Path) -> int:
    """Bytes of a regular file.

    Raises:
        NotRegularError: it is a directory, a pipe, a socket or a device.
        OSError: there is no such file.
    """
    path = expanded(path)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "pipe, socket or device"
        raise NotRegularError(errno.EINVAL, f"a regular file was expected, not a {kind}", str(path))
    return found.st_size


def check(path: str | Path, most_bytes: int) -> Path:
    """The path, `expanded`, of a file that may be read.

    Raises:
        OSError: as `size`.
        ValueError: it has more bytes than `most_bytes`.
    """
    if (found := size(path)) > most_bytes:
        raise ValueError(f"{expanded(path)}: {found} bytes; files of at most {most_bytes} bytes are read here")
    return expanded(path)


def opened(path: str | Path, most_bytes: int) -> BinaryIO:
    """A file to read from. It does not wait, even if a pipe has taken the file's place.

    Raises:
        OSError, ValueError: as `check`, or the file cannot be read.
    """
    return open(check(path, most_bytes), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_bytes(path: str | Path, most_bytes: int = DATA_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError, ValueError: as `check`, or the file cannot be read.
    """
    with opened(path, most_bytes) as stream:
        # A file of the kernel may hold more than its size says, or be waited for: then there is nothing.
        content: bytes = stream.read(most_bytes + 1) or b""
    if len(content) > most_bytes:
        raise ValueError(f"{expanded(path)}: more than {most_bytes} bytes; files of at most that many are read here")
    return content


def read_text(path: str | Path, most_bytes: int = TEXT_BYTES) -> str:
    r"""The text of a file in UTF-8; "\r\n" and "\r" become "\n".

    Raises:
        OSError, ValueError: as `read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, most_bytes)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{expanded(path)}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return io.StringIO(text, newline=None).read()
