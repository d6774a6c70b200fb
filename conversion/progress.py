"""Reports progress of long tasks on the error stream: a bar on a terminal, elsewhere lines at growing intervals."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_PATIENCE = 0.5
"""Seconds of work before the bar appears."""

_EVERY = 5.0
"""Seconds before the first line, and minimum between two lines."""


def pause(elapsed: float, least: float) -> float:
    """Seconds until the next line: the time that the work has taken so far, between `least` and one minute.

    Growing intervals keep the logs of long tasks short.
    """
    return max(least, min(elapsed, 60.0))


def watched(show: bool | None) -> bool:
    """Whether to report progress: `show` if it is given, else whether the error stream is a terminal."""
    return sys.stderr.isatty() if show is None else show


class Lines:
    """Prints progress lines at growing intervals, for logs and other outputs that are not terminals.

    Args:
        title: name of the task.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = self._last = time.monotonic()

    def tell(self, state: str) -> None:
        """Print the state, unless a line was printed recently."""
        now = time.monotonic()
        if now - self._last >= pause(self._last - self._begun, _EVERY):
            self._last = now
            print(f"{self._title}: {state}", file=sys.stderr, flush=True)


class Meter:
    """Reports the progress of one task in bytes.

    Args:
        title: name of the task.
        total: bytes in all; None if unknown.
        show: whether to report; None reports only if the error stream is a terminal.
    """

    def __init__(self, title: str, total: int | None, show: bool | None = None) -> None:
        self._title, self._total = title, total
        self._done = 0
        self._begun = time.monotonic()
        self._bar: Progress | None = None
        self._show = watched(show)
        self._lines = None if sys.stderr.isatty() else Lines(title)

    def advance(self, count: int) -> None:
        """Report `count` more bytes."""
        self.reach(self._done + count, self._total)

    def reach(self, done: int, total: int | None) -> None:
        """Report the bytes that are done, and the total if it is known."""
        self._done, self._total = done, total
        if not self._show:
            return
        if self._lines is not None:
            self._lines.tell(decimal(done) + (f" of {decimal(total)}, {done / total:.0%}" if total else ""))
            return
        if self._bar is None and time.monotonic() - self._begun > _PATIENCE:
            self._bar = self._draw()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _draw(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(self._title, total=self._total)
        bar.start()
        return bar

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
