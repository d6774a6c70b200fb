"""Files and folders that are written whole or not at all, and that take the place of nothing but what may be replaced.

What is being written lies in a scratch folder beside its place, ``.NAME.xxxxxxxx.kvjax``, whose lock the system gives up when the
process ends, however it ends. So the next one to write there knows what a killed one has left, and clears it up.
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
"""How names of scratch folders end, and the part of them that `tempfile` makes up."""

_PATIENCE = 5.0
"""Seconds that a pipe's reader has to open it."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of a disk that is full or fails, of a quota, and of a limit on files' sizes."""

_LOCK, _NEW, _OLD = "lock", "new", "old"
"""In a scratch folder: the lock, what is being written, and what was in its place."""


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file as `writing` does; text as UTF-8."""
    with writing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """A binary stream to a file that is there, in place of an older one, only once the block has ended without an error.

    Folders above it are made. A link is followed. Devices and pipes (``/dev/null``, ``/dev/stdout``) are written to, never replaced.

    Raises:
        OSError: something is there that is no file, as a folder, or the file cannot be made.
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
    """An empty folder that becomes `path` once the block has ended without an error; a link is followed.

    Args:
        path: the place; folders above it are made.
        check: raises unless a folder or file may be replaced. It gets what was at `path`, once that has been moved aside; if it
            raises, that goes back. Without it nothing is replaced.

    Raises:
        FileExistsError: something is at `path` that may not be replaced, perhaps since a moment ago. It is left as it is.
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
            raise FileExistsError(
                errno.EEXIST, f"there is something now, which is left as it is{kept}", str(path)
            ) from error


def _open_device(path: str | Path) -> int:
    """A descriptor to write to a device or pipe. A pipe that nobody reads is waited for only so long."""
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
    """Add text to a file, as UTF-8.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    with _naming(path), open(expanded(path), "a", encoding="utf-8") as stream:
        stream.write(content)


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Errors of writing say of which file: those of a full disk do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def recover(path: str | Path) -> None:
    """Clear up what killed processes have left beside `path`; what one had moved aside, and not yet replaced, goes back."""
    place = Path(os.path.realpath(expanded(path)))
    for folder in place.parent.glob(f".{glob.escape(place.name)}.{_RANDOM}{_ENDING}"):
        if (folder / _LOCK).is_file():
            # A lock that somebody has, or that cannot be had at all: the folder is not known to be abandoned.
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
    with contextlib.suppress(OSError):  # where there are no locks, nobody will take the folder for abandoned
        lock.acquire()
    try:
        yield folder
    finally:
        _settle(folder, place)
        lock.release()


def _claim(new: Path, place: Path) -> None:
    """Move a folder to where nothing is."""
    if os.name != "posix":
        new.rename(place)
        return
    place.mkdir()  # it fails if anything is there, where renaming would replace an empty folder
    try:
        new.rename(place)
    except BaseException:
        with contextlib.suppress(OSError):
            place.rmdir()
        raise


def _settle(folder: Path, place: Path) -> None:
    """Remove a scratch folder, after giving back what it holds of others."""
    old = folder / _OLD
    if os.path.lexists(old) and os.path.lexists(folder / _NEW):
        if os.path.lexists(place):
            return
        old.rename(place)
    shutil.rmtree(folder, ignore_errors=True)


def _mode(path: str | Path) -> int | None:
    """Type and permissions of what is at a path, or where it links to; None if there is nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
