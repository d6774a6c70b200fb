"""Output for its reader: colours and boxes on a terminal, plain lines in a pipe, JSON for programs."""

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
"""Stream for the JSON output of a command with `--json`."""

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide progress within the `with` block."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def is_quiet() -> bool:
    """Whether the running command hides progress."""
    return _quiet.get()


def output() -> Console:
    """Console for standard output. Not cached, as programs that embed a command may redirect the stream."""
    return Console(highlight=False, markup=False)


def errors() -> Console:
    """Console for standard error."""
    return Console(stderr=True, highlight=False, markup=False)


def as_json() -> bool:
    """Whether the running command was called with `--json`."""
    return _document.get() is not None


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """Reserve standard output for `print_json`; other output goes to standard error."""
    token = _document.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _document.reset(token)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    stream = _document.get() or sys.stdout
    text = strict_json.dumps(value, indent=2)
    if codecs.lookup(stream.encoding or "utf-8").name != "utf-8":
        text = json.dumps(json.loads(text), indent=2)  # escapes all non-ASCII characters
    print(text, file=stream, flush=True)


def say(kind: str, message: str, in_json: bool | None = None, **more: str) -> None:
    """Print a line on standard error; with `--json`, a JSON object.

    Args:
        kind: "error", "warning" or "progress".
        message: the text.
        in_json: whether the command has `--json`; threads have to pass it.
        more: further fields of the object.
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
    """Print a table that fits the terminal. In a pipe, columns are aligned and each row is one line.

    Args:
        columns: names of the columns.
        rows: texts of the cells.
        right: columns to align to the right.
        headers: whether to show the names of the columns.
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
    """Format bytes in powers of ten, such as 1.5 MB."""
    return decimal(count)


def shown(text: str, max_length: int = 600) -> str:
    """End of a long text, which is the part that a continuation follows."""
    return text if len(text) <= max_length else "…" + text[-max_length:]


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()
