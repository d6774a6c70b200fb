"""What every result file begins with, and result files that a later run can go on with."""

import datetime
import errno
import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax import json_lines, strict_json, user_files
from kvjax._version import __version__
from kvjax.files import append
from kvjax.files import write as write
from kvjax.models import Params
from kvjax.models.sharding import unpadded
from kvjax.policies.profile import fingerprint
from kvjax.runtime.mesh import on_host
from kvjax.runtime.processes import from_first, is_first

_MOST_BYTES = 1 << 29
"""Of a result file; the rows take up to three times as much memory."""

_SAMPLED = 1024
"""Values of each weight that a model's fingerprint is made of."""


def header(mesh: Mesh | None = None, /, **settings: Any) -> dict[str, Any]:
    """Versions, device and date of a run, the mesh it is over and the flags that XLA was given, if any, and the settings it was made with."""
    device = jax.devices()[0]
    over = {} if mesh is None else {"mesh": ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())}
    flags = {"xla_flags": found} if (found := os.environ.get("XLA_FLAGS")) else {}
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "host": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "kvjax": __version__}
        | {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "settings": settings,
    }
    return over | flags | about


def model_fingerprint(params: Params) -> str:
    """The architecture (as profiles know it), the type of the weights, and a hash of values from every weight."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(unpadded(params)):
        flat = leaf.reshape(-1)
        values = on_host(flat[:: max(1, flat.size // _SAMPLED)])
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} ".encode() + values.tobytes())
    return f"{fingerprint(params.config)} {params.dtype.name} {digest.hexdigest()[:16]}"


class ResultFile:
    """JSON lines: a header, then one row for every finished part of a run. What is there already is not run again.

    A last line without its newline that is not JSON was cut short while it was written. It is left out with a warning, and its part runs
    again. Anything else that is wrong with a file is an error, and leaves the file as it is.

    Args:
        path: the file; None keeps rows in memory alone.
        header: as `header` makes it. A file that is there must have been begun with the same settings and versions.
        kind: what a row is: a pydantic model, a dataclass, or anything that pydantic has an adapter for.
        check: given each row that is there, in order, says what is wrong with it, or None.
        mesh: devices that the run is over. Where several processes share them, only the first reads and writes the file, and tells the others
            which rows are there.

    Attributes:
        header: of the file, as it was begun.
        rows: all rows so far.

    Raises:
        ValueError: the file is not a result file, or of another run, or a row is not what it should be; the message says what
            differs, or which line it is.
    """

    def __init__(
        self,
        path: Path | None,
        header: dict[str, Any],
        kind: Any = dict[str, Any],
        check: Callable[[dict[str, Any]], str | None] = lambda row: None,
        mesh: Mesh | None = None,
    ) -> None:
        self.path = path if is_first(mesh) else None
        self.header: dict[str, Any] = strict_json.loads(strict_json.dumps(header))
        self.rows: list[dict[str, Any]] = []
        if path is not None:
            self.header, self.rows = from_first(mesh, lambda: self._begin(path, kind, check))

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, and have them on disk."""
        self.rows += rows
        if self.path is not None:
            append(self.path, "".join(strict_json.dumps(row) + "\n" for row in rows))

    def _begin(
        self, path: Path, kind: Any, check: Callable[[dict[str, Any]], str | None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Header and rows of the file; of a new one, which is made, ours and none."""
        if path.is_fifo():
            raise user_files.NotRegularError(
                errno.EINVAL, "a pipe cannot be gone on with; give a regular file", str(path)
            )
        if path.exists() and path.stat().st_size:
            return self._resume(path, kind, check)
        write(path, strict_json.dumps({"header": self.header}) + "\n")
        return self.header, []

    def _resume(
        self, path: Path, kind: Any, check: Callable[[dict[str, Any]], str | None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        content = whole = user_files.read_bytes(path, _MOST_BYTES)
        complete, _, last = content.rpartition(b"\n")
        if cut := bool(complete and last.strip()) and not _is_json(last):
            content = complete + b"\n"
        elif last:
            content += b"\n"
        lines = json_lines.numbered(content)
        _, first = next(lines, (1, b""))
        begun = _begun(path, first)
        different = [
            f"{group} {name}: {begun[group].get(name)!r} there, {self.header[group].get(name)!r} now"
            for group in ("settings", "versions")
            for name in {**begun[group], **self.header[group]}
            if begun[group].get(name) != self.header[group].get(name)
        ]
        if different:
            raise ValueError(f"{path} holds results of another run ({'; '.join(different)}); give another path")
        if cut:
            number = content.count(b"\n") + 1
            warnings.warn(
                f"{path}, line {number}: cut short as it was written; it is left out, and its part run again",
                stacklevel=8,
            )
        rows = []
        for number, line in lines:
            json_lines.parsed(path, number, line, kind)
            rows.append(strict_json.loads(line))
            if (wrong := check(rows[-1])) is not None:
                raise ValueError(
                    f"{path}, line {number}: {wrong}; remove the line to have it run again, or give another path"
                )
        if content != whole:
            write(path, content)
        return begun, rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file that is complete.

    Raises:
        ValueError: it is no result file, or a line is not JSON.
    """
    lines = json_lines.numbered(user_files.read_bytes(path, _MOST_BYTES))
    _, first = next(lines, (1, b""))
    _begun(path, first)
    return [json_lines.parsed(path, number, line, dict[str, Any]) for number, line in lines]


def _begun(path: Path, line: bytes) -> dict[str, Any]:
    """The header of a result file, from its first line."""
    try:
        begun = strict_json.loads(line)["header"]
        if all(isinstance(begun[group], dict) for group in ("settings", "versions")):
            return begun
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is there, but is not a result file of kvjax; give another path")


def _is_json(line: bytes) -> bool:
    try:
        strict_json.loads(line)
    except ValueError:
        return False
    return True
