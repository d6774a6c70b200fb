"""Orbax's own saving, with one tensor in memory at a time, or a few small ones.

Importing Orbax takes seconds and configures logging, so this module is imported only to write.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""Where TensorStore's text of an error has the system's number of it."""

_CHUNK_BYTES = 1 << 20
"""Size of the pieces in which tensors are stored, and which reading holds a few of."""

_BATCH_BYTES = 1 << 24
"""Size of the tensors that are written together.

Whenever something is written, the store writes its index of all tensors again, and keeps the old ones. With a write for each tensor, indices were a
third of a model of 600 tensors, and writing took five times as long.
"""


def save(path: Path, parameters: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Write an Orbax checkpoint of a flat dictionary.

    Args:
        path: the folder to make.
        parameters: by name, what makes the array. Each is called once those before it are on disk, but for the last few megabytes of them.

    Raises:
        OSError: the disk is full, for example.
    """
    tree = {name: _Later(read) for name, read in parameters.items()}
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    # Orbax warns of a registry that does not know of jax's arrays, though there are none.
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Later, _Batches()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, type_handler_registry=registry)
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)  # it logs the traceback of whatever is raised
    try:
        with ocp.Checkpointer(handler) as orbax:
            orbax.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunks))
    except Exception as error:  # TensorStore has the system's errors in its texts
        if (found := _SYSTEM_ERROR.search(str(error))) is None:
            raise
        code = int(found[1])
        raise OSError(code, os.strerror(code)) from error


class _Later:
    """A leaf that becomes an array when it is written."""

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self.read = read


class _Batches(ocp.type_handlers.NumpyHandler):
    """Writes leaves as NumPy arrays, each made when the ones before have been written, or are few bytes."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        batch, size = [], 0
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            array = value.read()
            if batch and size + array.nbytes > _BATCH_BYTES:
                await self._write(batch)
                batch, size = [], 0
            batch.append((array, info, arg))
            size += array.nbytes
        if batch:
            await self._write(batch)
        return []

    async def _write(self, batch: Sequence[tuple[Any, Any, Any]]) -> None:
        arrays, infos, args = zip(*batch, strict=True)
        for written in await super().serialize(arrays, infos, args):
            await asyncio.to_thread(written.result)

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        """What Orbax runs in a loop of its own. After an error, the writes that go on tell a loop that is closed, so they are waited for."""
        before = asyncio.all_tasks()
        try:
            await super()._background_serialize(values, infos, args)
        finally:
            await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Bytes written and read, which versions before 0.12 want for their log."""
        return [(0, 0)] * len(values)
