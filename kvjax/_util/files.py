"""Writes files and directories atomically, and replaces only what may be replaced.

Output is written to a scratch directory next to its destination, ``.NAME.xxxxxxxx.kvjax``, which contains a lock. The
system releases the lock when the process ends. The next writer thus recognises what a killed process left, and cleans
it up.
"""

import contextlib
import errno
import glob
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

from .user_files import expanded

_ENDING, _RANDOM = ".kvjax", "?" * 8
"""Suffix of scratch directories, and a pattern for the part that `tempfile` generates."""

_PATIENCE = 5.0
"""Seconds that a pipe's reader has to open it."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a full or failing disk, a quota, or a limit on file size."""

_LOCK, _NEW, _OLD = "lock", "new", "old"
"""Contents of a scratch directory: the lock, the output, and what was at its destination."""


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically, as `writing` does. Text is encoded as UTF-8."""
    with writing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary stream whose file appears, or replaces an older one, only if the block ends without an error.

    Parent directories are created and links are followed. Devices and pipes (``/dev/null``, ``/dev/stdout``) are
    written to, never replaced.

    Raises:
        OSError: the path is something else, such as a directory, or the file cannot be written.
    """
    path = expanded(path)
    mode = _mode(path)
    if mode is not None and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
        with _naming(path), tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            with os.fdopen(_open_device(path), "wb") as stream:
                shutil.copyfileobj(spool, stream)
        return
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, "something is there that is not a file, so it is not replaced", str(path))
    place = Path(os.path.realpath(path))
    with _naming(path), _scratch(place) as folder:
        with (folder / _NEW).open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            (folder / _NEW).chmod(stat.S_IMODE(mode))
        os.replace(folder / _NEW, place)


@contextlib.contextmanager
def directory(path: str | Path, check: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Make an empty directory that becomes `path` if the block ends without an error. Links are followed.

    Args:
        path: the destination. Parent directories are created.
        check: raises if the existing file or directory must not be replaced. It is called with what was at `path`,
            after that has been moved aside; if it raises, that is moved back. Without `check`, nothing is replaced.

    Raises:
        FileExistsError: `path` exists, perhaps only since a moment ago, and must not be replaced. It remains unchanged.
    """
    path = expanded(path)
    place = Path(os.path.realpath(path))
    with _naming(path), _scratch(place) as folder:
        new, old = folder / _NEW, folder / _OLD
        new.mkdir()
        yield new
        if check is not None and os.path.lexists(place):
            place.rename(old)
            check(old)
        try:
            _claim(new, place)
        except FileExistsError as error:
            kept = f"; what was there before is in {old}" if os.path.lexists(old) else ""
            raise FileExistsError(errno.EEXIST, f"something else is there now and was kept{kept}", str(path)) from error


def _open_device(path: str | Path) -> int:
    """Open a device or pipe for writing. Waits only a few seconds for a pipe's reader."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > end:
                raise OSError(errno.ENXIO, "a pipe that nobody reads; start its reader first", str(path)) from None
            time.sleep(0.05)
    os.set_blocking(descriptor, True)
    return descriptor


def append(path: str | Path, content: str) -> None:
    """Append text to a file, as UTF-8.

    Raises:
        OSError: the text cannot be written completely.
    """
    with _naming(path), open(expanded(path), "a", encoding="utf-8") as stream:
        stream.write(content)


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Add the file name to errors of writing, which those of a full disk lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def recover(path: str | Path) -> None:
    """Clean up what killed processes left next to `path`, and restore what they moved aside but did not replace."""
    place = Path(os.path.realpath(expanded(path)))
    for folder in place.parent.glob(f".{glob.escape(place.name)}.{_RANDOM}{_ENDING}"):
        if (folder / _LOCK).is_file():
            # If the lock is taken or unavailable, the directory may still be in use.
            with contextlib.suppress(filelock.Timeout, OSError), filelock.FileLock(folder / _LOCK, timeout=0):
                _settle(folder, place)


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, f"{place.parent} is not a folder", str(place)) from None
    recover(place)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=_ENDING, dir=place.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None
    lock = filelock.FileLock(folder / _LOCK, timeout=0)
    with contextlib.suppress(OSError):  # without locks, the directory never counts as abandoned
        lock.acquire()
    try:
        yield folder
    finally:
        _settle(folder, place)
        lock.release()


def _claim(new: Path, place: Path) -> None:
    """Move a directory to a path where nothing exists."""
    if os.name != "posix":
        new.rename(place)
        return
    place.mkdir()  # fails if anything exists, whereas renaming would replace an empty directory
    try:
        new.rename(place)
    except BaseException:
        with contextlib.suppress(OSError):
            place.rmdir()
        raise


def _settle(folder: Path, place: Path) -> None:
    """Remove a scratch directory, after restoring what was moved into it."""
    old = folder / _OLD
    if os.path.lexists(old) and os.path.lexists(folder / _NEW):
        if os.path.lexists(place):
            return
        old.rename(place)
    shutil.rmtree(folder, ignore_errors=True)


def _mode(path: str | Path) -> int | None:
    """Type and permissions of a path, with links followed; None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
