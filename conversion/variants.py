"""Normalises Hugging Face checkpoints that differ from their layout, as transformers does.

A base model's tensors lack the prefix ``model.``. If embedding and head share weights, a checkpoint may store either or
both. Sometimes both are stored and differ, although the configuration ties them.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ModelConfig

from .checkpoint import FLOATS, StoredTensor
from .errors import CheckpointError, told

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_PREFIX = "model."

_TEXT = "language_model.", "model.language_model."

_VISION = tuple(
    prefix + part for prefix in ("", _PREFIX) for part in ("vision_tower.", "multi_modal_projector.", "visual.")
)

_COMPARED = 1 << 20
"""Numbers compared at a time."""


def prefixed(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename tensors to the names of a causal model.

    Tensors of a base model get the missing prefix. Of a model with a vision tower, the text model's tensors are kept.
    """
    if any(name.startswith(_TEXT) for name in tensors):
        tensors = {_text_name(name): tensor for name, tensor in tensors.items() if not name.startswith(_VISION)}
    if any(name.startswith(_PREFIX) for name in tensors):
        return dict(tensors)
    return {name if name.startswith("lm_head.") else _PREFIX + name: tensor for name, tensor in tensors.items()}


def _text_name(name: str) -> str:
    """Name of a tensor of the text model alone: ``language_model.model.X`` and ``model.language_model.X`` are ``model.X``."""
    for prefix, ours in (
        ("language_model.model.", _PREFIX),
        ("model.language_model.", _PREFIX),
        ("language_model.", ""),
    ):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def without_predictors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Drop layers that predict tokens after the next one, which are stored after the model's own and have a projection `eh_proj`."""
    further = tuple(name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight"))
    return (
        {name: tensor for name, tensor in tensors.items() if not name.startswith(further)} if further else dict(tensors)
    )


def with_head(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], source: Path, *, compare: bool = True
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """Match the configuration to the embedding and head that the checkpoint stores.

    If the configuration ties them but the stored ones differ, the result is untied, with a warning. If only the head is
    stored, it is also the embedding.

    Args:
        config: the configuration.
        tensors: stored tensors, under the layout's names.
        source: file name for messages.
        compare: False if tensors cannot be read; the configuration is then trusted.

    Returns:
        The configuration and the tensors.

    Raises:
        CheckpointError: embedding or head cannot be read.
    """
    held = dict(tensors)
    if not config.tied or HEAD not in held:
        return config, held
    if EMBEDDING not in held:
        held[EMBEDDING] = held.pop(HEAD)
        return config, held
    if not compare or _equal(held[EMBEDDING], held[HEAD]):
        return config, held
    warnings.warn(
        f"{source}: the configuration ties the head to the embedding (tie_word_embeddings), but {HEAD} differs from {EMBEDDING}; "
        "the stored head is used. Set tie_word_embeddings to false to silence this warning",
        stacklevel=2,
    )
    return dataclasses.replace(config, tied=False), held


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal bit for bit. Stops at the first difference."""
    if one.shape != other.shape:
        return False
    dtype: Any = FLOATS.get(one.dtype, FLOATS["float32"]) if one.dtype == other.dtype else FLOATS["float32"]
    inner = one.shape[1:]
    step = max(1, _COMPARED // max(1, math.prod(inner)))
    for start in range(0, one.shape[0] if one.shape else 0, step):
        arrays = []
        for tensor in (one, other):
            array = np.empty((min(step, one.shape[0] - start), *inner), dtype)
            try:
                with np.errstate(all="ignore"):  # ignore NaN here; loading reports it
                    tensor.read(start, array)
            except CheckpointError:
                raise
            except (ValueError, OSError) as error:
                raise CheckpointError(
                    f"{tensor.file}: {HEAD} and {EMBEDDING} cannot be read ({told(error)})"
                ) from error
            arrays.append(array.view(f"u{array.itemsize}"))
        if not np.array_equal(*arrays):
            return False
    return True
