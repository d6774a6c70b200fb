"""Output that suits its reader: colours and boxes on a terminal, plain lines in a pipe, JSON for machines."""

import codecs
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvjax._util import strict_json

_document: ContextVar[TextIO | None] = ContextVar("document", default=None)
"""Where a command that was asked for JSON prints it."""

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within it nothing is said of how far anything is."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def is_quiet() -> bool:
    """Whether the running command was asked to say nothing of how far it is."""
    return _quiet.get()


def output() -> Console:
    """Standard output; made anew each time, since programs that embed a command may redirect the stream."""
    return Console(highlight=False, markup=False)


def errors() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, markup=False)


def as_json() -> bool:
    """Whether the running command was asked for JSON."""
    return _document.get() is not None


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """Standard output is for `print_json` alone; what else is printed goes to standard error."""
    token = _document.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _document.reset(token)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    stream = _document.get() or sys.stdout
    text = strict_json.dumps(value, indent=2)
    if codecs.lookup(stream.encoding or "utf-8").name != "utf-8":
        text = json.dumps(json.loads(text), indent=2)  # all but ASCII escaped
    print(text, file=stream, flush=True)


def say(kind: str, message: str, in_json: bool | None = None, **more: str) -> None:
    """A line on standard error, a JSON object where JSON was asked for.

    Args:
        kind: "error", "warning" or "progress".
        in_json: whether it was, for threads, which cannot tell.
        more: what else an object says.
    """
    if as_json() if in_json is None else in_json:
        print(strict_json.dumps({kind: message, **more}), file=sys.stderr, flush=True)
    elif kind == "progress":
        errors().print(Text(message), soft_wrap=True)
    else:
        colour = "bold red" if kind == "error" else "bold yellow"
        errors().print(Text.assemble((f"{kind}:", colour), " ", message), soft_wrap=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), headers: bool = True
) -> None:
    """A table fitted to the terminal; in a pipe, aligned columns, one line per row whatever its length.

    Args:
        right: columns of numbers, aligned to the right.
        headers: show the names of the columns.
    """
    console = output()
    fitted = console.is_terminal
    boxed = fitted and headers
    table = Table(
        box=Table().box if boxed else None, pad_edge=boxed, header_style="bold", show_lines=boxed, show_header=headers
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not fitted)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if fitted:
        console.print(table)
        return
    console.width = 100_000
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def size(count: int) -> str:
    """Bytes for people, in powers of ten: 1.5 MB."""
    return decimal(count)


def shown(text: str, max_length: int = 600) -> str:
    """The end of a long text, which is what a continuation follows."""
    return text if len(text) <= max_length else "…" + text[-max_length:]


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()
