"""What every result file begins with, and result files that a later run can go on with."""

import datetime
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax._version import __version__
from kvjax.files import write as write
from kvjax.models import Params
from kvjax.policies.profile import fingerprint

_SAMPLED = 1024
"""Values of each weight that a model's fingerprint is made of."""


def header(**settings: Any) -> dict[str, Any]:
    """Versions, device and date of a run, and the settings it was made with."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "host": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "kvjax": __version__}
        | {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "settings": settings,
    }


def model_fingerprint(params: Params) -> str:
    """The architecture (as profiles know it), the type of the weights, and a hash of values from every weight."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        flat = leaf.reshape(-1)
        values = np.asarray(flat[:: max(1, flat.size // _SAMPLED)])
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} ".encode() + values.tobytes())
    return f"{fingerprint(params.config)} {params.dtype.name} {digest.hexdigest()[:16]}"


class ResultFile:
    """JSON lines: a header, then one row for every finished part of a run. What is there already is not run again.

    Args:
        path: the file; None keeps rows in memory alone.
        header: as `header` makes it. A file that is there must have been begun with the same settings and versions.

    Attributes:
        header: of the file, as it was begun.
        rows: all rows so far.

    Raises:
        ValueError: the file is not a result file, or of another run; the message says what differs.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path = path
        self.header: dict[str, Any] = json.loads(json.dumps(header, default=str))
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists() and path.stat().st_size:
            self._resume(path)
        elif path is not None:
            write(path, json.dumps({"header": self.header}, ensure_ascii=False) + "\n")

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, and have them on disk."""
        self.rows += rows
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _resume(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # an interrupted write may have left half a line
        try:
            first, *rows = map(json.loads, whole)
            begun = first["header"]
            known = {name: begun[name] for name in ("settings", "versions")}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is there, but is not a result file of kvjax; give another path") from None
        different = [
            f"{group} {name}: {known[group].get(name)!r} there, {self.header[group].get(name)!r} now"
            for group in known
            for name in {**known[group], **self.header[group]}
            if known[group].get(name) != self.header[group].get(name)
        ]
        if different:
            raise ValueError(f"{path} holds results of another run ({'; '.join(different)}); give another path")
        if whole != lines:
            write(path, "".join(whole))
        self.header, self.rows = begun, rows
