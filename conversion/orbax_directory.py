"""Our own checkpoint: an Orbax pytree beside the configuration and the tokenizer.

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
from .config_json import Header, config_from_json, config_to_json
from .errors import CheckpointError, told
from .schema import Size, Strict, checked
from .text_files import present, read_json
from .tokenizer import Tokenizer

MARK = "kvjax.json"
"""The file that tells such a directory."""

VERSION = 1

_HEADER = b"/.zarray"
"""Ending of the key under which the store keeps an array's shape, type and chunks."""


def open_orbax(path: Path) -> Checkpoint:
    """Read the metadata of a directory that `write_orbax` wrote.

    Raises:
        CheckpointError: another version, unknown fields, or a damaged Orbax checkpoint.
    """
    header = checked(Header, read_json(path / MARK), path / MARK)
    if header.version != VERSION:
        raise CheckpointError(f"{path / MARK}: version {header.version}, this kvjax reads version {VERSION}")
    config = config_from_json(header.config, str(path / MARK))
    directory = path / "params"
    for file in directory.rglob("*"):
        if not file.is_dir():
            present(file)  # the store would wait for a pipe
    try:
        store = tensorstore.KvStore.open(_store(directory)).result()
        headers = {key: json.loads(store[key]) for key in store.list().result() if key.endswith(_HEADER)}
        if not headers:
            raise ValueError("it holds no arrays")
        tensors = {key.removesuffix(_HEADER).decode(): header for key, header in headers.items()}
    except (ValueError, OSError, KeyError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{directory}: not an Orbax checkpoint, or damaged ({told(error)})") from error
    held = join({name: _stored(directory, name, header) for name, header in tensors.items()}, directory)
    for name, tensor in held.items():
        if tensor.kept is None and tensor.dtype not in FLOATS:
            raise CheckpointError(f"{directory}: tensor {name} is of type {tensor.dtype}; give {', '.join(FLOATS)}")
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
        config: the model.
        parameters: by name, what makes the host array; called one after another, so that one array is held at a time, or a few small ones.
        dtype: name of the type that those have which are floats.
        tokenizer: written beside them.
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
    """Undo what writing with Orbax does to the program's logging: its messages, of absl, give the root logger a handler when it has none."""
    loggers = [logging.root, logging.getLogger("absl")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _store(directory: Path, prefix: str = "") -> dict[str, Any]:
    """Where the arrays are, in TensorStore's words.

    Reading goes to the array store beneath Orbax, in the layout that `write_orbax` asks Orbax for: its own restore holds four
    copies of a tensor on the way, and takes ten times as long when called for one tensor at a time.
    """
    return {"driver": "ocdbt", "base": directory.absolute().as_uri(), "path": prefix}


class _Array(Strict):
    """What is read of an array's header."""

    shape: list[Size]
    chunks: list[Size]
    dtype: Literal["<f4", "<f2", "bfloat16", "|i1", "|u1"]


def _stored(directory: Path, name: str, header: Any) -> StoredTensor:
    held = checked(_Array, header, f"{directory}: tensor {name}")
    shape, dtype = tuple(held.shape), np.dtype(held.dtype)
    if len(held.chunks) != len(shape) or any(map(operator.gt, held.chunks, shape)):
        raise CheckpointError(f"{directory}: tensor {name} of shape {list(shape)} is in pieces of {held.chunks}")

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        part = [slice(start, start + len(out)), *map(slice, out.shape[1:])]
        if out.ndim > 1:
            part[-1] = slice(column, column + out.shape[-1])
        spec = {"driver": "zarr", "kvstore": _store(directory, f"{name}/")}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
            rows = tensorstore.cast(array, tensorstore.dtype(out.dtype))[tuple(part)]
            # Straight into place, chunk by chunk.
            tensorstore.array(out).write(rows).result()
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{directory}: tensor {name} cannot be restored ({told(error)})") from error

    return StoredTensor(shape, dtype.name, math.prod(shape) * dtype.itemsize, directory, read)
