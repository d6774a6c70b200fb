"""The result file of a benchmark. Existing rows are not measured again, and new rows are written as they come."""

import dataclasses
import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvjax._util import strict_json, user_files
from kvjax._util.json_lines import Listed, complaint

from .case import Case

Row = dict[str, Any]


class Results:
    """A JSON file with a header and dated rows, in the order of the cases. Thread-safe.

    Args:
        path: the file.
        cases: cases to measure. Rows of other cases come first in the file.
        facts: header fields of a new file, in addition to those of the worker.
        said: called with each new row, one at a time.

    Attributes:
        rows: all rows so far.

    Raises:
        ValueError: the file is not a result file of kvjax, or a row is invalid or occurs twice.
    """

    def __init__(
        self, path: Path, cases: Sequence[Case], facts: Mapping[str, Any], said: Callable[[Row], None]
    ) -> None:
        self._path, self._cases, self._facts, self._said = path, cases, facts, said
        self._order = [_fields(case) for case in cases]
        self._lock = threading.Lock()
        self._header, self.rows = _read(path)

    def missing(self) -> list[Case]:
        """Cases without a row."""
        measured = {self._place(row) for row in self.rows}
        return [case for case in self._cases if self._place(_fields(case)) not in measured]

    def begin(self, header: Row) -> None:
        """Check that a worker's rows fit the file, before its first row.

        Args:
            header: the worker's header.

        Raises:
            ValueError: the file, or another worker, has another device or other versions or settings.
        """
        with self._lock:
            if self._header is None:
                self._header = {**header, **self._facts}
            for name in ("device", "versions", "settings"):
                known, now = self._header.get(name), header.get(name)
                if known != now:
                    raise ValueError(f"{self._path} has other {name} ({known}; now {now}); give another path")

    def add(self, case: Case, found: Row) -> None:
        """Write the result of a case."""
        from kvjax.evals import report

        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = _fields(case) | found | {"date": now}
        with self._lock:
            self.rows.append(row)
            self.rows.sort(key=self._place)
            content = {"header": self._header or {}, "rows": self.rows}
            report.write(self._path, strict_json.dumps(content, indent=1) + "\n")
            self._said(row)

    def _place(self, row: Row) -> int:
        fields = {field.name: row.get(field.name, field.default) for field in dataclasses.fields(Case)}
        return self._order.index(fields) if fields in self._order else -1


def _fields(case: Case) -> Row:
    """Fields of a case as in the file, with lists for tuples."""
    return strict_json.loads(strict_json.dumps(dataclasses.asdict(case)))


class _Row(BaseModel):
    """Fields of a row, besides its case, that tables and figures use."""

    failed: str | None = None
    tpot_ms: float | None = None
    ttft_s: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None
    tokens_per_s: float | None = None
    compile_s: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    batch_run: int | None = None


class _File(BaseModel):
    header: dict[str, Any]
    rows: Listed[dict[str, Any]]


def _read(path: Path) -> tuple[Row | None, list[Row]]:
    if not path.exists():
        return None, []
    content = user_files.read_bytes(path)
    try:
        found = _File.model_validate(strict_json.loads(content))
    except ValueError:
        raise ValueError(f"{path} is there, but is not a result file of kvjax; give another path") from None
    places: dict[str, int] = {}
    for number, row in enumerate(found.rows, 1):
        fields = {field.name for field in dataclasses.fields(Case)}
        place = strict_json.dumps({name: row[name] for name in sorted(row.keys() & fields)})
        try:
            TypeAdapter(Case).validate_json(place, strict=True)
            _Row.model_validate(row, strict=True)
        except ValidationError as error:
            raise ValueError(f"{path}, row {number}: {complaint(error)}; correct it, or give another path") from None
        if place in places:
            raise ValueError(f"{path}, row {number}: the case of row {places[place]} again; remove one of them")
        places[place] = number
    return found.header, found.rows
