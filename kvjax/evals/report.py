"""Headers of result files, and result files from which a later run resumes."""

import datetime
import errno
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic_core import from_json

from kvjax._util import json_lines, strict_json, user_files
from kvjax._util.files import append
from kvjax._util.files import write as write
from kvjax._version import __version__
from kvjax.models import Params
from kvjax.models.sharding import unpadded
from kvjax.policies.profile import fingerprint
from kvjax.runtime.mesh import on_host
from kvjax.runtime.processes import from_first, is_first

_MOST_BYTES = 1 << 29
"""Maximum size of a result file; its rows take up to three times as much memory."""

_SAMPLED = 1024
"""Values of each weight that go into a model's fingerprint."""


def header(mesh: Mesh | None = None, /, **settings: Any) -> dict[str, Any]:
    """Versions, device, date and settings of a run, with its mesh and XLA's flags, if there are any."""
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
    """JSON lines: a header, then one row for every finished part of a run. Parts that the file contains are not run again.

    A last line that has no newline and only begins a JSON document was truncated by an interruption. It is dropped with a warning, and
    its part runs again. Any other defect is an error, which leaves the file unchanged.

    Args:
        path: the file; None keeps rows only in memory.
        header: as returned by `header`. An existing file must have the same settings and versions.
        kind: type of a row: a pydantic model, a dataclass, or any other type that pydantic has an adapter for.
        check: called with each row of an existing file, in order; returns what is wrong with it, or None.
        mesh: devices of the run. If several processes share them, only the first reads and writes the file, and sends its rows to the
            others.

    Attributes:
        header: of the file; that of the first run.
        rows: all rows so far.

    Raises:
        ValueError: the file is not a result file, is of another run, or has an invalid row. The message names the difference or the line.
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
        """Add rows and write them to disk."""
        self.rows += rows
        if self.path is not None:
            append(self.path, "".join(strict_json.dumps(row) + "\n" for row in rows))

    def _begin(
        self, path: Path, kind: Any, check: Callable[[dict[str, Any]], str | None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Header and rows of the file. A new file is created with our header and no rows."""
        if path.is_fifo():
            raise user_files.NotRegularError(
                errno.EINVAL, "a run cannot resume from a pipe; give a regular file", str(path)
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
        if cut := bool(complete) and _is_cut(last):
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
                f"{path}, line {number}: cut short as it was written; it is dropped, and its part run again",
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
    """The rows of a complete result file.

    Raises:
        ValueError: the file is not a result file, or a line is not JSON.
    """
    return [json_lines.parsed(path, number, line, dict[str, Any]) for number, line in read(path)[1]]


def read(path: Path) -> tuple[dict[str, Any], Iterator[tuple[int, bytes]]]:
    """The header of a result file, and the lines of its rows with their numbers.

    Raises:
        ValueError: the file is not a result file.
    """
    lines = json_lines.numbered(user_files.read_bytes(path, _MOST_BYTES))
    _, first = next(lines, (1, b""))
    return _begun(path, first), lines


def _begun(path: Path, line: bytes) -> dict[str, Any]:
    """The header of a result file, from its first line."""
    try:
        begun = strict_json.loads(line)["header"]
        if all(isinstance(begun[group], dict) for group in ("settings", "versions")):
            return begun
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is there, but is not a result file of kvjax; give another path")


def _is_cut(line: bytes) -> bool:
    """Whether the line begins a JSON document whose end is missing. False for a whole document, also with bytes after it.

    A power failure can leave zeros where the end was to be.
    """
    begun = line.rstrip(b"\0").lstrip()
    if not begun:
        return bool(line.strip())
    try:
        from_json(begun, allow_partial=True)
    except ValueError:
        return False
    try:
        json.JSONDecoder().raw_decode(begun.decode(errors="replace"))
    except ValueError:
        return True
    return False


def name_part(label: str) -> str:
    """Label of a policy as part of a file's name."""
    return re.sub(r"[/\\:*?\"<>| ;]+", "_", label)
