"""Parameters of gated delta nets as Hugging Face checkpoints store them.

The kernels of the convolution have an axis of their own, [C, 1, W]. A family may store projections by key head (`Family.
groups_heads`): ``in_proj_qkvz`` then has, for each key head, the rows of its query, its key, its values and their gates.
``in_proj_ba`` has those of the rates and the decays of its values. Here, the rows of each parameter follow one another.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.config import DeltaNetConfig, ModelConfig

from .checkpoint import StoredTensor

_NAME = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(conv1d|in_proj_qkvz|in_proj_ba)\.weight")


def ungrouped(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors in the form of the layout. Those of other shapes than expected stay as they are."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if (held := _mixer(config, name)) is None:
            continue
        mixer, kind = held
        if kind == "conv1d" and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            found[name] = _without_axis(tensor)
        elif kind != "conv1d" and tensor.shape[0] == len(order := grouped_order(mixer, kind)):
            found[name] = with_rows(tensor, order)
    return found


def as_stored(config: ModelConfig, name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of the layout as a checkpoint has it. Of a quantised matrix, each array is a tensor."""
    held = _mixer(config, name)
    if held is None:
        return array
    mixer, kind = held
    return array[:, None] if kind == "conv1d" else array[np.argsort(grouped_order(mixer, kind))]


def stored_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of what `as_stored` returns for a tensor of this shape."""
    held = _mixer(config, name)
    return (shape[0], 1, *shape[1:]) if held is not None and held[1] == "conv1d" else shape


def is_regrouped(config: ModelConfig, name: str) -> bool:
    """Whether `as_stored` changes a tensor of this name."""
    return _mixer(config, name) is not None


def with_rows(tensor: StoredTensor, order: np.ndarray) -> StoredTensor:
    """A tensor whose row i is row `order[i]` of another one."""

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        for at, first, last in _runs(order[start : start + len(out)]):
            tensor.read(first, out[at : at + last - first], column)

    def keep(start: int, stop: int, columns: slice | None = None) -> Any:
        assert tensor.keep is not None
        kept = [tensor.keep(first, last, columns) for _, first, last in _runs(order[start:stop])]
        return jax.tree.map(lambda *each: np.concatenate(each), *kept)

    return dataclasses.replace(tensor, read=read, keep=None if tensor.keep is None else keep)


def _runs(rows: Sequence[int] | np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of consecutive rows: the place of the first in `rows`, the row, and the row after the last."""
    rows = np.asarray(rows)
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist()] if len(rows) else []
    ends = [*starts[1:], len(rows)]
    return [(a, int(rows[a]), int(rows[a]) + b - a) for a, b in zip(starts, ends, strict=True)]


def _mixer(config: ModelConfig, name: str) -> tuple[DeltaNetConfig, str] | None:
    """The delta net that a tensor belongs to, and the tensor's kind; None for a tensor that is stored as in the layout."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) >= config.num_layers:
        return None
    mixer = config.layers[int(match[1])].mixer
    return (mixer, match[2]) if isinstance(mixer, DeltaNetConfig) else None


def grouped_order(mixer: DeltaNetConfig, kind: str) -> np.ndarray:
    """Row of the file for each row of the layout."""
    group = mixer.value_heads // mixer.key_heads
    keys, values = mixer.key_dim, group * mixer.value_dim
    sizes = [keys, keys, values, values] if kind == "in_proj_qkvz" else [group, group]
    rows = np.arange(mixer.key_heads * sum(sizes)).reshape(mixer.key_heads, -1)
    return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


def _without_axis(tensor: StoredTensor) -> StoredTensor:
    """Kernels [C, 1, W] as [C, W]."""

    def read(start: int, out: np.ndarray, column: int = 0) -> None:
        tensor.read(start, out[:, None], column)

    return dataclasses.replace(tensor, shape=(tensor.shape[0], tensor.shape[2]), read=read)
