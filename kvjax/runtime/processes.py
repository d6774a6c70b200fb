"""Several processes that share a mesh, as by `jax.distributed`: all do the same, and the first reads and writes files for all."""

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
    """Whether the devices are those of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def is_first(mesh: Mesh | None) -> bool:
    """Whether this process is the one that writes: the first of those that share a mesh, or one by itself."""
    return not several(mesh) or jax.process_index() == 0


def from_first(mesh: Mesh | None, find: Callable[[], Any]) -> Any:
    """What `find` gives in the first of the processes that share a mesh, in each of them: files need to be there alone.

    Args:
        find: returns what JSON takes. Of one process, its result is given back as it is.

    Raises:
        ValueError: so does `find`, in each process; or it raises an `OSError`, which stays one in the first.
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
    """Arrays of NumPy, or a tree of them, as the first of the processes that share a mesh has them; the others give such of equal shapes."""
    if not several(mesh):
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    # As bytes, which all types are and JAX changes none of.
    told = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves]
    with lost_processes(mesh):
        told = multihost_utils.broadcast_one_to_all(told)
    return tree.unflatten(
        [np.array(own).view(leaf.dtype).reshape(leaf.shape) for own, leaf in zip(told, leaves, strict=True)]
    )


def check_same(mesh: Mesh | None, tokens: Sequence[Sequence[int]], *options: Any) -> None:
    """Raise `ValueError` unless all processes of a mesh were given the same; one process knows that it was."""
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
    """Say what it most likely means where devices of several processes fail to reach each other."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several(mesh) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise ConnectionError(
            f"another process of the mesh has most likely ended, look at what it printed; start all of them anew ({error})"
        ) from error
