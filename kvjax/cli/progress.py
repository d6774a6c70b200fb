"""Progress of a command: a bar or spinner on a terminal, plain lines elsewhere (logs, pipes), nothing with `--quiet`."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import console

PATIENCE, EVERY = 2.0, 10.0
"""Seconds until the first line, and minimum between two lines."""

Begin = Callable[[str], Callable[[int, int], Any]]
"""Begins a task with a title, and ends the previous one. Returns a callback for the finished and total amounts."""


@contextmanager
def bar() -> Iterator[Begin]:
    """A progress bar with the remaining time of each task."""
    if console.is_quiet():
        yield lambda title: lambda done, total: None
        return
    if not _watched():
        with _lines() as lines:
            yield lines
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # On a terminal, other output appears above the bar. Output to a file or pipe must not be captured by rich.
    with Progress(*columns, console=console.errors(), transient=True, redirect_stdout=console.on_terminal()) as shown:

        def begin(title: str) -> Callable[[int, int], Any]:
            for task in shown.task_ids:
                shown.remove_task(task)
            task = shown.add_task(title, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield begin


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner while the block runs."""
    if _watched() and not console.is_quiet():
        from rich.text import Text

        with console.errors().status(Text(what)):
            yield
        return
    with unwatched(what):
        yield


@contextmanager
def unwatched(what: str) -> Iterator[None]:
    """Lines while the block runs, if there is no terminal. On a terminal, the block draws a bar of its own."""
    if _watched() or console.is_quiet():
        yield
        return
    with _lines() as begin:
        begin(what)
        yield


def _watched() -> bool:
    errors = console.errors()
    return (
        errors.is_terminal and errors.file.isatty() and not errors.is_dumb_terminal
    )  # also with FORCE_COLOR, which CI sets


@contextmanager
def _lines() -> Iterator[Begin]:
    """Lines printed by a thread, as a task may compile for minutes."""
    from kvjax.conversion.progress import pause  # imported late, as this imports JAX and `--help` must not wait for it

    said: dict[str, Any] = {}
    over, as_json = threading.Event(), console.as_json()

    def begin(title: str) -> Callable[[int, int], Any]:
        said.update(title=title, since=time.monotonic(), count="")
        return lambda done, total: said.update(count=f"{done} of {total}, ")

    def tell() -> None:
        seconds = 0.0
        while not over.wait(pause(seconds, EVERY) if seconds else PATIENCE):
            if said:
                seconds = time.monotonic() - said["since"]
                console.say("progress", f"{said['title']}: {said['count']}{seconds:.0f} s", as_json)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield begin
    finally:
        over.set()
        teller.join()
