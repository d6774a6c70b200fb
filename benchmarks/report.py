"""How the result files of benchmarks are written; they begin as those of `kvjax.evals` do."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from kvjax._util import strict_json
from kvjax.evals import report
from kvjax.evals.report import header as header


def write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a result file (whole or not at all)."""
    report.write(path, json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


def begun(path: Path, header: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a result file that a run goes on with: what is there if it is of the same run, else this header and none.

    Raises:
        SystemExit: the file has other settings, versions or another device.
    """
    if not path.exists():
        return header, []
    there = strict_json.loads(path.read_text())
    for group in ("settings", "versions", "device"):
        if there["header"][group] != strict_json.loads(strict_json.dumps(header[group])):
            raise SystemExit(
                f"{path} has other {group}: {there['header'][group]}, now {header[group]}; give another --out"
            )
    return there["header"], there["rows"]


def alone(path: Path | None) -> AbstractContextManager[Any]:
    """Wait until no other program that was given this lock file uses the device; None: there is none to wait for."""
    return nullcontext() if path is None else FileLock(path)


def device_slug() -> str:
    """The device at hand, as names of result files have it."""
    return "-".join(jax.devices()[0].device_kind.lower().replace("nvidia", "").split())
