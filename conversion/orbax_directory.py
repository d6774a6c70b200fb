"""Reads and writes kvjax's own checkpoints: an Orbax pytree, the configuration and the tokenizer.

::

        kvjax.json             version, configuration, type of the parameters
        params/                Orbax checkpoint of a flat dictionary, parameter name → array
        tokenizer.json …       as in a Hugging Face directory
"""

import contextlib
import functools
import json
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorstore

from kvjax.config import ModelConfig

from .checkpoint import FLOATS, Checkpoint, StoredTensor, join, parameter_shapes
from .config_json import VERSION, Header, config_from_json, config_to_json
from .errors import CheckpointError, told
from .schema import Size, Strict, checked
from .text_files import present, read_json
from .tokenizer import Tokenizer

MARK = "kvjax.json"
"""The file that identifies a kvjax checkpoint."""

_HEADER = b"/.zarray"
"""Suffix of the keys under which the store has an array's shape, type and chunks."""


def open_orbax(path: Path) -> Checkpoint:
    """Read the metadata of a directory that `write_orbax` wrote.

    Raises:
        CheckpointError: the version is not supported, fields are unknown, or the Orbax checkpoint is damaged.
    """
    header = checked(Header, read_json(path / MARK), path / MARK)
    config = config_from_json(header.config, str(path / MARK), header.version)
    directory = path / "params"
    for file in directory.rglob("*"):
        if not file.is_dir():
            present(file)  # raises for a pipe, on which the store would block
    try:
        store = tensorstore.KvStore.open(_store(directory)).result()
        headers = {key: json.loads(store[key]) for key in store.list().result() if key.endswith(_HEADER)}
        if not headers:
            raise ValueError("it contains no arrays")
        tensors = {key.removesuffix(_HEADER).decode(): header for key, header in headers.items()}
    except (ValueError, OSError, KeyError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{directory}: not an Orbax checkpoint, or damaged ({told(error)})") from error
    held = join({name: _stored(directory, name, header) for name, header in tensors.items()}, directory)
    for name, tensor in held.items():
        if tensor.kept is None and tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{directory}: tensor {name} is of type {tensor.dtype}; supported are {', '.join(FLOATS)}"
            )
    return Checkpoint(
        source=path,
        format="orbax",
        config=config,
        tensors=held,
        layout_of=lambda config: {name: (name,) for name in parameter_shapes(config)},
        ignored=lambda name: False,
        tokenizer=functools.partial(
            Tokenizer.from_directory, path, eos=config.eos, bos=config.bos, vocab_size=config.vocab_size
        ),
    )


def write_orbax(
    path: Path,
    config: ModelConfig,
    parameters: Mapping[str, Callable[[], np.ndarray]],
    dtype: str,
    tokenizer: Tokenizer | None,
) -> None:
    """Write a checkpoint into an existing, empty directory.

    Args:
        path: the directory.
        config: the model's configuration.
        parameters: by name, functions that return host arrays. They are called one at a time, so that memory holds one
            array, or a few small ones.
        dtype: name of the type of floating-point parameters.
        tokenizer: written to the same directory.
    """
    with _logging_as_it_was():
        from . import orbax_streaming

        orbax_streaming.save(path / "params", parameters)
    if tokenizer is not None:
        tokenizer.save(path)
    header = {"version": VERSION, "dtype": dtype, "config": config_to_json(config)}
    (path / MARK).write_text(json.dumps(header, indent=2), encoding="utf-8")


@contextlib.contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """Restore the program's logging after a write. Orbax logs with absl, which adds a handler to a root logger that has
    none.
    """
    loggers = [logging.root, logging.getLogger("absl")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _store(directory: Path, prefix: str = "") -> dict[str, Any]:
    """TensorStore's specification of the key-value store.

    Arrays are read from the store below Orbax, in the layout that `write_orbax` requests. Orbax's restore holds four
    copies of a tensor at a time, and takes ten times as long when tensors are restored one by one.
    """
    return {"driver": "ocdbt", "base": directory.absolute().as_uri(), "path": prefix}


class _Array(Strict):
    """The fields of an array's header that are read."""

    shape: list[Size]
    chunks: list[Size]
    dtype: Literal["<f4", "<f2", "bfloat16", "|i1", "|u1"]


def _stored(directory: Path, name: str, header: Any) -> StoredTensor:
    held = checked(_Array, header, f"{directory}: tensor {name}")
    shape, dtype = tuple(held.shape), np.dtype(held.dtype)
    if len(held.chunks) != len(shape) or any(map(operator.gt, held.chunks, shape)):
        raise CheckpointError(
            f"{directory}: tensor {name} of shape {list(shape)} has chunks of {held.chunks}, which do not fit it"
        )

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        part = [slice(start, start + len(out)), *map(slice, out.shape[1:])]
        if out.ndim > 1:
            part[-1] = slice(column, column + out.shape[-1])
        spec = {"driver": "zarr", "kvstore": _store(directory, f"{name}/")}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
            rows = tensorstore.cast(array, tensorstore.dtype(out.dtype))[tuple(part)]
            # Reads straight into `out`, chunk by chunk.
            tensorstore.array(out).write(rows).result()
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{directory}: tensor {name} cannot be restored ({told(error)})") from error

    return StoredTensor(shape, dtype.name, math.prod(shape) * dtype.itemsize, directory, read)
