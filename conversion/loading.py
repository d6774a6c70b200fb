"""`load`: one function for every kind of checkpoint."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.models.params import Params

from .checkpoint import FLOATS, Checkpoint, assemble
from .errors import CheckpointError
from .huggingface import PICKLES, open_directory, refuse_pickle


def load(source: str | Path, *, dtype: Any = None, device: Any = None, progress: bool | None = None) -> Params:
    """Load a model, its tensors streaming from the file to the device one at a time.

    Args:
        source: a Hugging Face directory.
        dtype: type of the parameters, float32, bfloat16 or float16. By default float32 on CPU and the checkpoint's own
            elsewhere.
        device: a jax device or sharding to put the parameters on; None is jax's default device.
        progress: draw a progress bar; None draws one if the error stream is a terminal.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, unsafe or of an unknown kind.
    """
    checkpoint = open_checkpoint(source)
    return assemble(checkpoint, _dtype(dtype, checkpoint, device), device, progress)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Find a checkpoint and read its headers."""
    path = Path(source)
    if path.suffix in PICKLES:
        refuse_pickle(path)
    if path.is_dir():
        return open_directory(path)
    raise CheckpointError(f"{source}: no such file or directory")


def _dtype(dtype: Any, checkpoint: Checkpoint, device: Any) -> str:
    if dtype is None:
        return "float32" if _platform(device) == "cpu" else checkpoint.own_dtype
    name = np.dtype(dtype).name
    if name not in FLOATS:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(FLOATS)}")
    return name


def _platform(device: Any) -> str:
    devices = getattr(device, "device_set", None) or ({device} if device is not None else set(jax.devices()[:1]))
    return next(iter(devices)).platform
