"""Tensors of a file that `torch.save` wrote, read without torch, and without running anything that is in it.

Such a file is a zip archive with a pickle, which says what tensors there are, and the bytes of each of them. A pickle can name any function to
be called; here only those that put tensors together are, by code of this module, and whatever else it names is nothing.
"""

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_TYPES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}


def read(path: Path) -> Any:
    """What was saved: dictionaries, lists and numbers as they are, tensors as NumPy arrays, and anything else as an empty object.

    Raises:
        ValueError: it is no such file, it is damaged, or it has tensors of other types than floats and whole numbers.
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (found,) = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            folder = found.removesuffix("data.pkl")
            if folder + "byteorder" in archive.namelist() and archive.read(folder + "byteorder") != b"little":
                raise ValueError("its numbers are not stored with the lowest byte first")
            with archive.open(found) as stream:
                return _Reader(stream, archive, folder).load()
    except OSError:
        raise
    except Exception as error:  # whatever a damaged archive or pickle leads to
        raise ValueError(
            f"{path} is no file of torch.save that can be read ({error or type(error).__name__}); give one that torch 1.6 or newer wrote"
        ) from None


class _Nothing:
    """In place of an object of an unknown kind: takes whatever it is given, and has none of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "_Nothing":
        return _Nothing()

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _Reader(pickle.Unpickler):
    def __init__(self, stream: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._archive, self._folder = archive, folder

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name == "collections.OrderedDict":
            return collections.OrderedDict
        if name == "torch._utils._rebuild_tensor_v2":
            return _tensor
        if name == "torch._utils._rebuild_parameter":
            return _parameter
        if module_name == "torch" and global_name.endswith("Storage"):
            return global_name
        return _Nothing

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, kind, key, _, count = pid
        if kind not in _TYPES:
            raise ValueError(f"a tensor of type {kind!r}; of these, {', '.join(_TYPES)} are read")
        numbers = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), _TYPES[kind])
        if len(numbers) != count:
            raise ValueError(f"{len(numbers)} numbers stored of {count}")
        return numbers


def _tensor(numbers: np.ndarray, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if (
        min((start, *shape, *strides)) < 0
        or (math.prod(shape) and last >= len(numbers))
        or math.prod(shape) > len(numbers)
    ):
        raise ValueError(f"a tensor of shape {shape} that does not fit what is stored of it")
    steps = tuple(stride * numbers.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(numbers[start:], shape, steps, writeable=False).copy()


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
