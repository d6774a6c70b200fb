"""Result files of benchmarks, and the Markdown tables made of them. Result files have the same header as those of `kvjax.evals`."""

import datetime
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from kvjax.evals import report
from kvjax.evals.report import header as header


def read(path: Path) -> dict[str, Any]:
    """The header and the rows of a result file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a result file, atomically. Each row is one line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    report.write(path, f'{{\n "header": {json.dumps(header)},\n "rows": [\n{lines}\n ]\n}}\n')


def begun(path: Path, header: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of the result file that a run continues; `header` and no rows if the file does not exist.

    Raises:
        SystemExit: the file was measured with other settings or versions, or on another device.
    """
    if not path.exists():
        return header, []
    found = read(path)
    for group in ("device", "versions", "settings"):
        if found["header"][group] != json.loads(json.dumps(header[group])):
            raise SystemExit(
                f"{path} was measured with other {group}: {found['header'][group]}, now {header[group]}. Remove it to measure "
                "everything again, or give another --out"
            )
    return found["header"], found["rows"]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """A Markdown table.

    Args:
        align: "l" or "r" for each column, left or right; the last letter is for all further columns.
    """
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(heads), align[-1])[: len(heads)]]
    lines = [heads, rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured_here() -> dict[str, str | None]:
    """The date, and the machine by the id of its current boot (None if the system has none). Only times of one machine are compared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": boot.read_text(encoding="ascii").strip() if boot.is_file() else None,
    }


def alone(path: Path | None) -> AbstractContextManager[Any]:
    """Hold a lock file while the device is used, so that programs with the same file wait for one another; None for no lock."""
    return nullcontext() if path is None else FileLock(path)


def device_slug() -> str:
    """The device's name in names of result files."""
    return slug(jax.devices()[0].device_kind)


def slug(kind: str) -> str:
    """A kind of device, as in names of result files."""
    return "-".join(kind.lower().replace("nvidia", "").split())
