"""A progress bar with the time left, for those who watch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .console import errors


@contextmanager
def bar() -> Iterator[Callable[[str], Callable[[int, int], Any] | None]]:
    """A function that begins a bar with a title, on standard error if that is a terminal; each replaces the one before.

    What it returns is called with what is done and in all; None where nobody watches.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = errors()
    if not console.is_terminal:
        yield lambda title: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:

        def begin(title: str) -> Callable[[int, int], Any]:
            for task in shown.task_ids:
                shown.remove_task(task)
            task = shown.add_task(title, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield begin
