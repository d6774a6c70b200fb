"""JSON lines, one object per line, of which each is what it should be: or the message says which line of which file is not."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from . import strict_json

T = TypeVar("T")

_MARK = b"\xef\xbb\xbf"
"""Which some editors open UTF-8 with."""


def read(path: Path, kind: type[T], max_lines: int | None = None) -> list[T]:
    """All lines of a file, or the first `max_lines`, as `kind`: a pydantic model or a dataclass. Blank lines count for nothing.

    Raises:
        ValueError: there is no line, or one is not UTF-8, not JSON, or lacks something that `kind` has or has it otherwise.
        OSError: the file cannot be read.
    """
    content = path.read_bytes().removeprefix(_MARK)
    found = [parsed(path, number, line, kind) for number, line in numbered(content)[:max_lines]]
    if not found:
        raise ValueError(f"{path}: no rows; give a file of JSON lines")
    return found


def read_rows(path: Path, kind: type[T], max_rows: int | None = None) -> list[T]:
    """The same of a file of JSON lines, or of one JSON document that is a list of rows.

    Raises:
        ValueError, OSError: as `read`.
    """
    content = path.read_bytes().removeprefix(_MARK)
    if not content.lstrip().startswith(b"["):
        return read(path, kind, max_rows)
    try:
        listed = strict_json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    found: list[T] = []
    for number, row in enumerate(listed[:max_rows], 1):
        try:
            found.append(TypeAdapter(kind).validate_python(row, strict=True))
        except ValidationError as error:
            raise ValueError(f"{path}, row {number}: {complaint(error)}") from None
    if not found:
        raise ValueError(f"{path}: no rows; give a file of JSON lines, or a list of rows")
    return found


def numbered(content: bytes) -> list[tuple[int, bytes]]:
    r"""The lines that are not blank, with their numbers.

    A line ends with \n alone: JSON has U+0085, U+2028 and U+2029 as they are inside its strings, where `str.splitlines` would cut.
    """
    return [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def parsed(path: Path, number: int, line: bytes, kind: Any) -> Any:
    """One line as `kind`.

    Raises:
        ValueError: as `read`.
    """
    try:
        strict_json.loads(line)
        return TypeAdapter(kind).validate_json(line, strict=True)
    except ValidationError as error:
        raise ValueError(f"{path}, line {number}: {complaint(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, as "where: what (what was found)"."""
    first: Any = error.errors(include_url=False)[0]
    what = first["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f", not {repr(first['input'])[:60]}"
    return f"{where + ': ' if where else ''}{what[:1].lower()}{what[1:]}{found}"
