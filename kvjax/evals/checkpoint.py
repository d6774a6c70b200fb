"""The state of a long text on disk, so that an interrupted run resumes."""

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kvjax._util import files, user_files

_REST_BYTES = 1 << 28
"""Maximum size of a file besides its caches: the scores of 64 million tokens."""


class Checkpoint:
    """Caches, scores so far, and the position in the text, in one `.npz` file.

    Args:
        path: the file; it is replaced atomically.
        run: settings that identify the run, as JSON; a file with other settings is refused.
        seconds: minimum time between two writes.
    """

    def __init__(self, path: Path, run: dict[str, Any], seconds: float = 60.0) -> None:
        self._path, self._run, self._seconds = path, json.dumps(run, sort_keys=True, default=str), seconds
        self._written = time.monotonic()

    def load(self, like: Any) -> tuple[Any, int, Float[np.ndarray, "1 T"]] | None:
        """Caches as NumPy arrays of the shapes and types of `like`, the position T, and the scores; None if there is no file.

        Raises:
            ValueError: the file is of another run, or not a checkpoint.
            OSError: the file is not a regular file, or cannot be read.
        """
        if not self._path.exists():
            return None
        leaves, tree = jax.tree.flatten(like)
        room = sum(leaf.nbytes for leaf in leaves) + _REST_BYTES
        with user_files.opened(self._path, room) as stream:
            try:
                with np.load(stream) as file:
                    # Uncompressed arrays are as large as the file; compressed ones could be a thousand times larger.
                    if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.zip.infolist()):
                        raise ValueError("it is compressed")
                    run, reached, scores = str(file["run"]), int(file["position"]), file["scores"]
                    stored = [file[f"leaf{i}"] for i in range(len(leaves))]
                if scores.shape != (1, reached) or scores.dtype != np.float32:
                    raise ValueError(f"scores of shape {scores.shape} for {reached} tokens")
            except Exception as error:  # NumPy raises errors of any type for damaged files
                raise ValueError(
                    f"{self._path} is no checkpoint that can be read ({error or type(error).__name__}); remove it to start again"
                ) from None
        if run != self._run:
            raise ValueError(
                f"{self._path} is of another run: {run} there, {self._run} now; remove it, or give another path"
            )
        if any(raw.dtype != np.uint8 or raw.size != leaf.nbytes for raw, leaf in zip(stored, leaves, strict=True)):
            raise ValueError(f"{self._path} has caches of other sizes than this run's; remove it to start again")
        restored = [raw.view(leaf.dtype).reshape(leaf.shape) for raw, leaf in zip(stored, leaves, strict=True)]
        return jax.tree.unflatten(tree, restored), reached, scores

    @property
    def due(self) -> bool:
        """Whether the last write was long enough ago."""
        return time.monotonic() - self._written >= self._seconds

    def save(self, caches: Any, position: int, scores: np.ndarray) -> None:
        """Write the file."""
        # As bytes: NumPy's format does not know bfloat16.
        leaves: dict[str, Any] = {
            f"leaf{i}": np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            for i, leaf in enumerate(jax.device_get(jax.tree.leaves(caches)))
        }
        with files.writing(self._path) as file:
            np.savez(file, run=np.asarray(self._run), position=position, scores=scores, **leaves)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the file, when the run is complete."""
        self._path.unlink(missing_ok=True)
