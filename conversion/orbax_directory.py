"""Our own checkpoint: an Orbax pytree beside the configuration and the tokenizer.

::

    kvjax.json             version, configuration, type of the parameters
    params/                Orbax checkpoint of a flat dictionary, parameter name → array
    tokenizer.json …       as in a Hugging Face directory
"""

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from kvjax.models.config import ModelConfig

from .checkpoint import Checkpoint, StoredTensor, parameter_shapes
from .config_json import config_from_json, config_to_json
from .errors import CheckpointError
from .huggingface import read_json
from .tokenizer import Tokenizer

MARK = "kvjax.json"
"""The file that tells such a directory."""

VERSION = 1


def open_orbax(path: Path) -> Checkpoint:
    """Read the metadata of a directory that `write_orbax` wrote.

    Raises:
        CheckpointError: another version, unknown fields, or a damaged Orbax checkpoint.
    """
    header = read_json(path / MARK)
    if header.get("version") != VERSION:
        raise CheckpointError(f"{path / MARK}: version {header.get('version')!r}, this kvjax reads version {VERSION}")
    config = config_from_json(header.get("config", {}), str(path / MARK))
    directory = path / "params"
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            found = orbax.metadata(directory.absolute()).item_metadata.tree
    except Exception as error:  # Orbax and the stores under it share no base class
        raise CheckpointError(f"{directory}: not an Orbax checkpoint, or damaged ({error})") from error
    return Checkpoint(
        source=path,
        format="orbax",
        config=config,
        tensors={name: _stored(directory, name, metadata) for name, metadata in found.items()},
        layout={name: (name,) for name in parameter_shapes(config)},
        ignored=lambda name: False,
        tokenizer=functools.partial(Tokenizer.from_directory, path, eos=config.eos, bos=config.bos),
    )


def write_orbax(
    path: Path,
    config: ModelConfig,
    parameters: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    tokenizer: Tokenizer | None,
) -> None:
    """Write a checkpoint into an existing, empty directory.

    Args:
        path: the directory.
        config: the model.
        parameters: host arrays by parameter name.
        dtype: name of their type.
        tokenizer: written beside them.
    """
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save((path / "params").absolute(), args=ocp.args.PyTreeSave(dict(parameters)))
    if tokenizer is not None:
        tokenizer.save(path)
    header = {"version": VERSION, "dtype": dtype, "config": config_to_json(config)}
    (path / MARK).write_text(json.dumps(header, indent=2), encoding="utf-8")


def _stored(directory: Path, name: str, metadata: Any) -> StoredTensor:
    def read(start: int, out: np.ndarray) -> None:
        request = ocp.args.PyTreeRestore(
            item={name: metadata},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=out.dtype)},
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                out[...] = orbax.restore(directory.absolute(), args=request)[name][start : start + len(out)]
        except Exception as error:  # Orbax and the stores under it share no base class
            raise CheckpointError(f"{directory}: tensor {name} cannot be restored ({error})") from error

    shape, dtype = tuple(metadata.shape), np.dtype(metadata.dtype)
    return StoredTensor(shape, dtype.name, math.prod(shape) * dtype.itemsize, directory, read)
