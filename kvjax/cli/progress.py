"""How far something is: a bar or a spinner on a terminal, and elsewhere (logs, pipes) plain lines; with `--quiet` nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import console

PATIENCE, EVERY = 2.0, 10.0
"""Seconds until the first line, and at least from one line to the next."""

Begin = Callable[[str], Callable[[int, int], Any]]
"""Begins something with a title, which takes the place of what went on before; gives what to call with what is done, and in all."""


@contextmanager
def bar() -> Iterator[Begin]:
    """A bar with the time left for each thing that is begun."""
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
    # What is printed meanwhile appears above the bar; where it goes to a file or a pipe, rich is not to catch it.
    with Progress(*columns, console=console.errors(), transient=True, redirect_stdout=console.on_terminal()) as shown:

        def begin(title: str) -> Callable[[int, int], Any]:
            for task in shown.task_ids:
                shown.remove_task(task)
            task = shown.add_task(title, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield begin


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner for as long as the block runs."""
    if _watched() and not console.is_quiet():
        from rich.text import Text

        with console.errors().status(Text(what)):
            yield
        return
    with unwatched(what):
        yield


@contextmanager
def unwatched(what: str) -> Iterator[None]:
    """Lines, but where there is no terminal alone: on one, what the block runs draws a bar of its own."""
    if _watched() or console.is_quiet():
        yield
        return
    with _lines() as begin:
        begin(what)
        yield


def _watched() -> bool:
    errors = console.errors()
    return errors.is_terminal and not errors.is_dumb_terminal


@contextmanager
def _lines() -> Iterator[Begin]:
    """Lines from a thread of their own: what is told may be compiling for minutes."""
    from kvjax.conversion.progress import pause  # not above: this imports JAX, and `--help` does not wait for that

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
