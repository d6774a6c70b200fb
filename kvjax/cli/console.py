"""Output that suits its reader: colours and boxes on a terminal, plain lines in a pipe, JSON for machines."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Standard output; made anew each time, since programs that embed a command may redirect the stream."""
    return Console(highlight=False, markup=False)


def errors() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, markup=False)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on standard error, if that is a terminal, for as long as the block runs."""
    console = errors()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what)):
        yield


def print_json(value: Any) -> None:
    """One JSON document on standard output; what JSON has no form for is written as Python shows it."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=repr))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), headers: bool = True
) -> None:
    """A table fitted to the terminal; in a pipe, aligned columns, one line a row whatever its length.

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


def shown(text: str, most: int = 600) -> str:
    """The end of a long text, which is what a continuation follows."""
    return text if len(text) <= most else "…" + text[-most:]


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()
