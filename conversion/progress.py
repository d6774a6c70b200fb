"""A progress bar on the error stream that appears only where someone may watch, and only for work that takes a while."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_PATIENCE = 0.5
"""Seconds of work before the bar appears."""


def watched(show: bool | None) -> bool:
    """Whether to draw: as told, or if the error stream is a terminal."""
    return sys.stderr.isatty() if show is None else show


class Meter:
    """Counts bytes of one task.

    Args:
        title: what is being done.
        total: bytes to do; None if unknown.
        show: True draws always, False never, None only if the error stream is a terminal.
    """

    def __init__(self, title: str, total: int | None, show: bool | None = None) -> None:
        self._title, self._total = title, total
        self._done = 0
        self._begun = time.monotonic()
        self._bar: Progress | None = None
        self._show = watched(show)

    def advance(self, count: int) -> None:
        """Report `count` more bytes."""
        self._done += count
        if self._bar is None and self._show and time.monotonic() - self._begun > _PATIENCE:
            self._bar = self._draw()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _draw(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
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
