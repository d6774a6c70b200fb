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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import filelock

_ENDING, _RANDOM = ".kvjax", "?" * 8
"""How names of scratch folders end, and the part of them that `tempfile` makes up."""

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
    mode = _mode(path)
    if mode is not None and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            with open(path, "wb") as stream:
                shutil.copyfileobj(spool, stream)
        return
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, "something is there that is not a file, so it is not replaced", str(path))
    place = Path(os.path.realpath(path))
    with _scratch(place) as folder:
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
    place = Path(os.path.realpath(path))
    with _scratch(place) as folder:
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


def recover(path: str | Path) -> None:
    """Clear up what killed processes have left beside `path`; what one had moved aside, and not yet replaced, goes back."""
    place = Path(os.path.realpath(path))
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
