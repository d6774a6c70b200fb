"""JSON lines, one object per line, of which each is what it should be: or the message says which line of which file is not."""

import io
import itertools
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, TypeAdapter, ValidationError

from . import strict_json, user_files

T = TypeVar("T")


class _FailFast(FailFast):
    """Pydantic's, which unions cannot hash."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(self.fail_fast)


Listed = Annotated[list[T], _FailFast()]
"""A list in a `kind`, of which only the first wrong item is told: a file may have millions."""

_MOST_LINE = 1 << 24
"""Bytes of a line. Errors hold Python's objects of a line several times, which take up to 25 times as much memory."""

_MARK = b"\xef\xbb\xbf"
"""Which some editors open UTF-8 with."""


class FormError(ValueError):
    """A JSON document is not what it should be."""


def read(path: Path, kind: type[T], max_lines: int | None = None) -> list[T]:
    """All lines of a file, or the first `max_lines`, as `kind`: a pydantic model or a dataclass. Blank lines count for nothing.

    Raises:
        ValueError: there is no line, or one is not UTF-8, not JSON, or lacks something that `kind` has or has it otherwise; or the file is
            too large.
        OSError: the file cannot be read, or is not a regular one.
    """
    return _read(path, user_files.read_bytes(path).removeprefix(_MARK), kind, max_lines)


def _read(path: Path, content: bytes, kind: type[T], max_lines: int | None) -> list[T]:
    lines = itertools.islice(numbered(content), max_lines)
    found = [parsed(path, number, line, kind) for number, line in lines]
    if not found:
        raise ValueError(f"{path}: no rows; give a file of JSON lines")
    return found


def read_rows(path: Path, kind: type[T], max_rows: int | None = None) -> list[T]:
    """The same of a file of JSON lines, or of one JSON document that is a list of rows.

    Raises:
        ValueError, OSError: as `read`.
    """
    content = user_files.read_bytes(path).removeprefix(_MARK)
    if not content.lstrip().startswith(b"["):
        return _read(path, content, kind, max_rows)
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


def numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    r"""The lines that are not blank, with their numbers.

    A line ends with \n alone: JSON has U+0085, U+2028 and U+2029 as they are inside its strings, where `str.splitlines` would cut.
    """
    lines = enumerate(io.BytesIO(content), 1)
    return ((number, line.removesuffix(b"\n")) for number, line in lines if line.strip())


def parsed(path: Path, number: int, line: bytes, kind: Any) -> Any:
    """One line as `kind`.

    Raises:
        ValueError: as `read`.
    """
    if len(line) > _MOST_LINE:
        raise ValueError(f"{path}, line {number}: {len(line)} bytes; a line has at most {_MOST_LINE}")
    try:
        return validated(line, kind)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def validated(text: bytes, kind: Any) -> Any:
    """A JSON document as `kind`.

    Raises:
        FormError: it lacks something that `kind` has, or has it otherwise.
        ValueError: it is not UTF-8, or not JSON.
    """
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            strict_json.loads(text)  # says where
        raise FormError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, as "where: what (what was found)"."""
    first: Any = error.errors(include_url=False)[0]
    what = first["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f", not {_shown(first['input'])}"
    return f"{where + ': ' if where else ''}{what[:1].lower()}{what[1:]}{found}"


def _shown(value: Any) -> str:
    """The beginning of a value, however large it is."""
    return (repr(value[:60]) if isinstance(value, str) else reprlib.repr(value))[:60]
