"""Saves with Orbax while memory holds only one tensor, or a few small ones.

Importing Orbax takes seconds and configures logging, so this module is imported only to write.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kvjax._util import interrupts

_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""The system's error number in a TensorStore message."""

_CHUNK_BYTES = 1 << 20
"""Size of the chunks in which tensors are stored, in bytes. Reading holds a few of them."""

_BATCH_BYTES = 1 << 24
"""Tensors are written in batches of up to this size, in bytes.

Every write appends a new index of all tensors to the store. With one write per tensor, the indices were a third of a
checkpoint of 600 tensors, and writing took five times as long.
"""


def save(path: Path, parameters: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Write an Orbax checkpoint of a flat dictionary.

    Ctrl-C takes effect before the next array is read, when no write is pending. An exception amid Orbax's writes would
    leave them running in other threads, in a directory that the caller deletes.

    Args:
        path: directory to create.
        parameters: by name, functions that return host arrays. Each is called once the arrays before it are on disk,
            except for the last few megabytes.

    Raises:
        OSError: for example, the disk is full.
    """
    with interrupts.held_back() as interrupted:

        def uninterrupted(read: Callable[[], np.ndarray]) -> np.ndarray:
            if interrupted:
                raise InterruptedError
            return read()

        _save(path, {name: partial(uninterrupted, read) for name, read in parameters.items()})


def _save(path: Path, parameters: Mapping[str, Callable[[], np.ndarray]]) -> None:
    tree = {name: _Later(read) for name, read in parameters.items()}
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    # Without a jax.Array handler, Orbax warns, although the tree contains none.
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Later, _Batches()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, type_handler_registry=registry)
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)  # absl would log the traceback of every exception
    try:
        with ocp.Checkpointer(handler) as orbax:
            orbax.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunks))
    except Exception as error:  # TensorStore reports system errors only in its messages
        if (found := _SYSTEM_ERROR.search(str(error))) is None:
            raise
        code = int(found[1])
        raise OSError(code, os.strerror(code)) from error


class _Later:
    """A leaf that is converted to an array when it is written."""

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self.read = read


class _Batches(ocp.type_handlers.NumpyHandler):
    """Writes leaves as NumPy arrays. Each batch of small arrays is on disk before the next is read."""

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
        """Wait for pending writes after an error. Orbax closes the event loop, to which those writes would still
        report.
        """
        before = asyncio.all_tasks()
        try:
            await super()._background_serialize(values, infos, args)
        finally:
            await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Bytes written and read, which Orbax before 0.12 needs for its log."""
        return [(0, 0)] * len(values)
