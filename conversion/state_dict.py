"""Parameters from arrays already in memory, by the names of a Hugging Face checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.params import Params

from .checkpoint import Checkpoint, StoredTensor, assemble
from .huggingface import ignored
from .layout import hf_layout


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
    return assemble(
        Checkpoint(
            source=Path("state dict"),
            format="safetensors",
            config=config,
            tensors={name: _held(array) for name, array in tensors.items()},
            layout_of=hf_layout,
            ignored=ignored(config),
            tokenizer=lambda: tokenizer,
        ),
        np.dtype(dtype).name,
        progress=False,
    )


def _held(array: np.ndarray) -> StoredTensor:
    def read(start: int, out: np.ndarray) -> None:
        out[...] = array[start : start + len(out)]

    return StoredTensor(array.shape, array.dtype.name, array.nbytes, Path("state dict"), read)
