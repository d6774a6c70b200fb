"""Coordinates processes that share a mesh (`jax.distributed`): all run the same calls, and the first reads and writes files."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh


def several(mesh: Mesh | None) -> bool:
    """Whether the mesh has devices of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def is_first(mesh: Mesh | None) -> bool:
    """Whether this process writes files: the first process of the mesh, or a single process."""
    return not several(mesh) or jax.process_index() == 0


def from_first(mesh: Mesh | None, find: Callable[[], Any]) -> Any:
    """Call `find` in the first process of the mesh, and return its result in all. Files are then needed only there.

    Args:
        mesh: the mesh.
        find: returns a JSON-serialisable value. With one process, any value is returned unchanged.

    Raises:
        ValueError: `find` raised a ValueError or OSError. In the first process, the original error is raised.
    """
    if not several(mesh):
        return find()
    told, failed = b"", None
    if jax.process_index() == 0:
        try:
            told = json.dumps({"found": find()}).encode()
        except (ValueError, OSError) as error:
            told, failed = json.dumps({"error": str(error)}).encode(), error
    size = int(broadcast(mesh, np.int32(len(told))))
    numbers = np.frombuffer(told, np.uint8) if told else np.zeros(size, np.uint8)
    answer = json.loads(broadcast(mesh, numbers).tobytes())
    if failed is not None:
        raise failed
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["found"]


def broadcast(mesh: Mesh | None, arrays: Any) -> Any:
    """Return the first process's NumPy arrays (or tree of arrays) in all processes. The others pass arrays of the same shapes."""
    if not several(mesh):
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    # As bytes, since JAX may change other types.
    told = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves]
    with lost_processes(mesh):
        told = multihost_utils.broadcast_one_to_all(told)
    return tree.unflatten(
        [np.array(own).view(leaf.dtype).reshape(leaf.shape) for own, leaf in zip(told, leaves, strict=True)]
    )


def check_same(mesh: Mesh | None, tokens: Sequence[Sequence[int]], *options: Any) -> None:
    """Raise `ValueError` unless all processes of a mesh were given the same tokens and options."""
    if not several(mesh):
        return
    told = repr(([list(map(int, row)) for row in tokens], jax.tree.map(str, options)))
    digest = hashlib.sha256(told.encode()).digest()
    with lost_processes(mesh):
        others = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)))
    if (others != others[0]).any():
        raise ValueError(
            f"prompts and options are not the same in all {len(others)} processes; give each process the same"
        )


@contextlib.contextmanager
def lost_processes(mesh: Mesh | None) -> Iterator[None]:
    """Explain the error if devices of several processes cannot reach each other."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several(mesh) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise ConnectionError(
            f"another process of the mesh has most likely ended, look at what it printed; restart all of them ({error})"
        ) from error
