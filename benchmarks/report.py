"""What every result file begins with, and how it is written."""

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import kvjax


def header(**settings: Any) -> dict[str, Any]:
    """Versions, device and date of a run, and the settings it was made with."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "host": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "kvjax": kvjax.__version__}
        | {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "settings": settings,
    }


def write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a result file (whole or not at all)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    temporary.replace(path)
