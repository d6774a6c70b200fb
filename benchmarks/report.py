"""How the result files of benchmarks are written; they begin as those of `kvjax.evals` do."""

import json
from pathlib import Path
from typing import Any

import jax

from kvjax.evals import report
from kvjax.evals.report import header as header


def write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a result file (whole or not at all)."""
    report.write(path, json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


def device_slug() -> str:
    """The device at hand, as names of result files have it."""
    return "-".join(jax.devices()[0].device_kind.lower().replace("nvidia", "").split())
