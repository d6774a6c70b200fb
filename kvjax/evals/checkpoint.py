"""Checkpoints of a long run over one text, so that an interrupted run can resume."""

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kvjax import files, user_files

_REST_BYTES = 1 << 28
"""Maximum bytes of a file besides the caches: scores of 64 million tokens."""


class Checkpoint:
    """Caches, measurements so far, and the position reached in the text, in one `.npz` file.

    Args:
        path: the file, which is written atomically.
        run: settings that identify the run, as JSON. A file of another run is refused.
        seconds: minimum time between two writes.
    """

    def __init__(self, path: Path, run: dict[str, Any], seconds: float = 60.0) -> None:
        self._path, self._run, self._seconds = path, json.dumps(run, sort_keys=True, default=str), seconds
        self._written = time.monotonic()

    def load(self, like: Any) -> tuple[Any, int, Float[np.ndarray, "1 T"]] | None:
        """Load NumPy caches with the shapes and dtypes of `like`, the position T, and the scores, or None.

        Raises:
            ValueError: the file belongs to another run, or is not a checkpoint.
            OSError: the file is not a regular file, or cannot be read.
        """
        if not self._path.exists():
            return None
        leaves, tree = jax.tree.flatten(like)
        room = sum(leaf.nbytes for leaf in leaves) + _REST_BYTES
        with user_files.opened(self._path, room) as stream:
            try:
                with np.load(stream) as file:
                    # Uncompressed arrays are no larger than the file. Compressed ones could be a thousand times larger.
                    if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.zip.infolist()):
                        raise ValueError("it is compressed")
                    run, reached, scores = str(file["run"]), int(file["position"]), file["scores"]
                    stored = [file[f"leaf{i}"] for i in range(len(leaves))]
                if scores.shape != (1, reached) or scores.dtype != np.float32:
                    raise ValueError(f"scores of shape {scores.shape} for {reached} tokens")
            except Exception as error:  # NumPy raises various errors for damaged bytes
                raise ValueError(
                    f"{self._path} is not a readable checkpoint ({error or type(error).__name__}). Remove it to start again."
                ) from None
        if run != self._run:
            raise ValueError(
                f"{self._path} belongs to another run: {run} in the file, {self._run} now. Remove it, or give another path."
            )
        if any(raw.dtype != np.uint8 or raw.size != leaf.nbytes for raw, leaf in zip(stored, leaves, strict=True)):
            raise ValueError(f"{self._path} has caches of other sizes than this run's. Remove it to start again.")
        restored = [raw.view(leaf.dtype).reshape(leaf.shape) for raw, leaf in zip(stored, leaves, strict=True)]
        return jax.tree.unflatten(tree, restored), reached, scores

    @property
    def due(self) -> bool:
        """Whether the minimum time since the last write has passed."""
        return time.monotonic() - self._written >= self._seconds

    def save(self, caches: Any, position: int, scores: np.ndarray) -> None:
        """Write the checkpoint."""
        # As bytes, because NumPy's format does not support bfloat16.
        leaves: dict[str, Any] = {
            f"leaf{i}": np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            for i, leaf in enumerate(jax.device_get(jax.tree.leaves(caches)))
        }
        with files.writing(self._path) as file:
            np.savez(file, run=np.asarray(self._run), position=position, scores=scores, **leaves)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the file, after the run is complete."""
        self._path.unlink(missing_ok=True)
