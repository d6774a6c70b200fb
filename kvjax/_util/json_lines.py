"""Reads and validates JSON lines, one object per line. Errors name the file and the line."""

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
    """Pydantic's class with a hash, which unions need."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(self.fail_fast)


Listed = Annotated[list[T], _FailFast()]
"""A list that reports only its first invalid item, as a file may have millions."""

_MOST_LINE = 1 << 24
"""Limit on the bytes of a line. Errors hold the Python objects of a line several times, at up to 25 times its size."""

_MARK = b"\xef\xbb\xbf"
"""Byte order mark, with which some editors begin UTF-8 files."""


class FormError(ValueError):
    """A JSON document does not match the expected type."""


def read(path: Path, kind: type[T], max_lines: int | None = None) -> list[T]:
    """Read the lines of a file (the first `max_lines`, if given) as `kind`, a pydantic model or a dataclass. Blank lines are skipped.

    Raises:
        ValueError: the file is empty or too large, or a line is not UTF-8, not JSON, or does not match `kind`.
        OSError: the file cannot be read, or is not a regular file.
    """
    return _read(path, user_files.read_bytes(path).removeprefix(_MARK), kind, max_lines)


def _read(path: Path, content: bytes, kind: type[T], max_lines: int | None) -> list[T]:
    lines = itertools.islice(numbered(content), max_lines)
    found = [parsed(path, number, line, kind) for number, line in lines]
    if not found:
        raise ValueError(f"{path}: no rows; give a file of JSON lines")
    return found


def read_rows(path: Path, kind: type[T], max_rows: int | None = None) -> list[T]:
    """Read a file of JSON lines, or of one JSON document that is a list of rows, as `kind`.

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
    r"""Lines that are not blank, with their numbers.

    Only \n ends a line. JSON strings may contain U+0085, U+2028 and U+2029, at which `str.splitlines` would split.
    """
    lines = enumerate(io.BytesIO(content), 1)
    return ((number, line.removesuffix(b"\n")) for number, line in lines if line.strip())


def parsed(path: Path, number: int, line: bytes, kind: Any) -> Any:
    """Parse one line as `kind`.

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
    """Parse a JSON document as `kind`.

    Raises:
        FormError: the document does not match `kind`.
        ValueError: the document is not UTF-8, or not JSON.
    """
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            strict_json.loads(text)  # raises with the position
        raise FormError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """First error of a validation, as "where: what (what was found)"."""
    first: Any = error.errors(include_url=False)[0]
    what = first["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, first["loc"]))
    found = "" if first["type"] == "missing" else f", not {_shown(first['input'])}"
    return f"{where + ': ' if where else ''}{what[:1].lower()}{what[1:]}{found}"


def _shown(value: Any) -> str:
    """Beginning of a value of any size."""
    return (repr(value[:60]) if isinstance(value, str) else reprlib.repr(value))[:60]
