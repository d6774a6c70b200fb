"""Arrays already in memory as a checkpoint: those of a Hugging Face model to load, or parameters to write."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.config import ModelConfig
from kvjax.models.params import Params, name_of
from kvjax.models.sharding import get_shard, mesh_of, own_shape, place

from .checkpoint import Checkpoint, StoredTensor, assemble, check_kinds, join, kinds_of, parameter_shapes
from .huggingface import ignored
from .layout import hf_layout
from .tokenizer import Tokenizer
from .variants import prefixed, with_head


def from_state_dict(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32", tokenizer: Any = None
) -> Params:
    """Parameters from host arrays, with the checks of a file.

    Args:
        config: the model.
        tensors: arrays by Hugging Face name, e.g. a transformers model's `state_dict()` turned to numpy.
        dtype: type of the parameters: float32, float16 or bfloat16.
        tokenizer: carried along.

    Raises:
        CheckpointError: missing, unexpected or wrongly shaped tensors.
    """
    source = Path("state dict")
    config, held = with_head(config, prefixed({name: _held(array) for name, array in tensors.items()}), source)
    return assemble(
        Checkpoint(
            source=source,
            format="safetensors",
            config=config,
            tensors=held,
            layout_of=hf_layout,
            ignored=ignored(config),
            tokenizer=lambda: tokenizer,
        ),
        np.dtype(dtype).name,
        progress=False,
    )


def quantize_weights(params: Params, weights: str = "int8", embedding: str | None = None) -> Params:
    """Parameters in memory with their matrices held otherwise, one after the other by way of the host.

    Args:
        params: what `kvjax.load` or `kvjax.models.init` gives.
        weights, embedding: as for `kvjax.load`.

    Raises:
        CheckpointError: a matrix cannot be held so.
        TypeError: these are no parameters, or shapes alone.
        ValueError: an unknown kind of weights.
    """
    check_kinds(weights, embedding)
    checkpoint = checkpoint_of(params)
    mesh = mesh_of(params)
    put = None
    if mesh is not None:
        shard = get_shard(mesh, params.config)
        put = lambda name, _, read: place(shard, name, read())  # noqa: E731
    return assemble(checkpoint, params.dtype.name, put, False, kinds_of(checkpoint, weights, embedding))


def checkpoint_of(params: Params) -> Checkpoint:
    """Parameters as a checkpoint, which reads each from its device when asked to.

    Raises:
        TypeError: these are no parameters, or shapes alone.
    """
    if not isinstance(params, Params):
        raise TypeError(f"params is of type {type(params).__name__}; give what kvjax.load returns")
    if not isinstance(params.tokenizer, Tokenizer | None):
        raise TypeError(
            f"the tokenizer is of type {type(params.tokenizer).__name__}; give a kvjax.conversion.Tokenizer, or None"
        )
    leaves = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    shapes, mesh = parameter_shapes(params.config), mesh_of(params)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(
                f"parameter {name} is of type {type(leaf).__name__}, which holds no numbers; give loaded ones"
            )
    return Checkpoint(
        source=Path("parameters"),
        format="parameters",
        config=params.config,
        tensors=join(
            {name: _held(leaf, mesh and own_shape(name, leaf.shape, shapes)) for name, leaf in leaves.items()},
            Path("parameters"),
        ),
        layout_of=lambda config: {name: (name,) for name in parameter_shapes(config)},
        ignored=lambda name: False,
        tokenizer=lambda: params.tokenizer,
    )


def _held(array: np.ndarray | jax.Array, shape: tuple[int, ...] | None = None) -> StoredTensor:
    """An array in memory, without what a mesh may have padded it with."""
    shape = array.shape if shape is None else shape

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        inner = [*map(slice, shape[1:-1]), slice(column, column + out.shape[-1])] if len(shape) > 1 else []
        # A part of its own: an array keeps the copy that the host was given of the whole of it.
        out[...] = np.asarray(array[start : start + len(out)])[(slice(None), *inner)]

    return StoredTensor(shape, array.dtype.name, math.prod(shape) * array.dtype.itemsize, Path("state dict"), read)
