"""Arrays in memory as a checkpoint: a Hugging Face state dict to load, or parameters to save or quantise."""

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
from .delta_nets import ungrouped
from .experts import stacked
from .huggingface import ignored
from .layout import hf_layout
from .tokenizer import Tokenizer
from .variants import prefixed, with_head


def from_state_dict(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: str = "float32", tokenizer: Any = None
) -> Params:
    """Build parameters from host arrays, with the same checks as for files.

    Args:
        config: the model's configuration.
        tensors: arrays by Hugging Face name, e.g. a transformers model's `state_dict()` converted to NumPy.
        dtype: type of the parameters: float32, float16 or bfloat16.
        tokenizer: tokenizer to attach to the parameters.

    Raises:
        CheckpointError: tensors are missing, unexpected or wrongly shaped.

    Example:
        >>> import tempfile
        >>> import safetensors.numpy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = kvjax.save(params, f"{folder}/model", format="safetensors")
        ...     tensors = safetensors.numpy.load_file(path / "model.safetensors")
        >>> copy = kvjax.conversion.from_state_dict(params.config, tensors)
        >>> bool((copy.embed == params.embed).all())
        True
    """
    source = Path("state dict")
    held = ungrouped(config, stacked(config, prefixed({name: _held(array) for name, array in tensors.items()})))
    config, held = with_head(config, held, source)
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
    """Convert the weight matrices of loaded parameters to another kind, one at a time, on the host.

    Args:
        params: parameters from `kvjax.load` or `kvjax.models.init`.
        weights, embedding: as for `kvjax.load`.

    Returns:
        New parameters, sharded as `params`.

    Raises:
        CheckpointError: a matrix cannot be converted to the requested kind.
        TypeError: `params` are not parameters, or are shapes only.
        ValueError: `weights` or `embedding` is not supported.

    Example:
        >>> params = kvjax.conversion.quantize_weights(params, "int4")
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
    """View parameters as a checkpoint. Each parameter is read from its device on demand.

    Raises:
        TypeError: `params` are not parameters, or are shapes only.
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
                f"parameter {name} is of type {type(leaf).__name__}, which has no numbers; give loaded parameters"
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
    """View an array as a tensor, without the padding that sharding may have added."""
    shape = array.shape if shape is None else shape

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        inner = [*map(slice, shape[1:-1]), slice(column, column + out.shape[-1])] if len(shape) > 1 else []
        # Convert only the part: a jax array caches the host copy of whatever is converted.
        out[...] = np.asarray(array[start : start + len(out)])[(slice(None), *inner)]

    return StoredTensor(shape, array.dtype.name, math.prod(shape) * array.dtype.itemsize, Path("state dict"), read)
