"""Tensors of a file that `torch.save` wrote, read without torch, and without running anything that is in it.

Such a file is a zip archive with a pickle, which says what tensors there are, and the bytes of each of them. A pickle can name any function to
be called; here only those that put tensors together are, by code of this module, and whatever else it names is nothing.

A small file can claim, or unpack to, any number of bytes. So there are bounds, and they are checked before anything is unpacked.
"""

import collections
import io
import math
import mmap
import pickle
import pickletools
import stat
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

MOST_BYTES = 1 << 30
"""Of a file, of what it unpacks to, and of all its tensors: more than published weights of policies have."""

_PICKLE_BYTES = 1 << 22
"""Of the pickle, which becomes up to a hundred times as many of objects; a model's hundred thousand parameters take less."""

_ENTRIES = 1 << 16
"""Of the archive, one for each tensor."""

_ENTRY = b"PK\x01\x02"
"""What each begins with in the archive's directory."""

_METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
"""Ways to compress whose pieces can be unpacked within bounds; torch stores without any."""

_PIECE = 1 << 20
"""Bytes that are unpacked at a time."""


def read(path: Path) -> Any:
    """What was saved: dictionaries, lists and numbers as they are, tensors as NumPy arrays (read-only), and anything else as an empty object.

    Raises:
        ValueError: it is no such file, it is damaged, it has tensors of other types than floats and whole numbers, or more than `MOST_BYTES`.
        OSError: the file cannot be read.
    """
    try:
        _check_size(path)
        with zipfile.ZipFile(path) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > MOST_BYTES:
                raise ValueError(f"it unpacks to {size} bytes; at most {MOST_BYTES} are read")
            if any(entry.compress_type not in _METHODS for entry in archive.infolist()):
                raise ValueError("it is compressed in another way than deflated")
            (found,) = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            folder = found.removesuffix("data.pkl")
            if (
                folder + "byteorder" in archive.namelist()
                and bytes(_unpacked(archive, folder + "byteorder")) != b"little"
            ):
                raise ValueError("its numbers are not stored with the lowest byte first")
            if (size := archive.getinfo(found).file_size) > _PICKLE_BYTES:
                raise ValueError(f"its list of tensors has {size} bytes; at most {_PICKLE_BYTES} are read")
            listed = bytes(_unpacked(archive, found))
            _check_memo(listed)
            return _Reader(io.BytesIO(listed), archive, folder).load()
    except OSError:
        raise
    except Exception as error:  # whatever a damaged archive or pickle leads to
        raise ValueError(
            f"{path} is no file of torch.save that can be read ({error or type(error).__name__}); give one that torch 1.6 or newer wrote"
        ) from None


def _check_size(path: Path) -> None:
    """Refuse a file that is too large, or whose archive has too many entries, each of which becomes an object."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is no regular file")
    if about.st_size > MOST_BYTES:
        raise ValueError(f"it has {about.st_size} bytes; at most {MOST_BYTES} are read")
    if not about.st_size:
        raise ValueError("it is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = -1
        for _ in range(_ENTRIES + 1):
            if (at := content.find(_ENTRY, at + 1)) < 0:
                return
    raise ValueError(f"its archive has more than {_ENTRIES} entries")


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytearray:
    """An entry's bytes, as many as the archive says it has; in pieces, since the archive may say fewer than there are."""
    content, at = memoryview(bytearray(archive.getinfo(name).file_size)), 0
    with archive.open(name) as stream:
        while part := stream.read(_PIECE):
            content[at : at + len(part)] = part
            at += len(part)
    if at != len(content):
        raise ValueError(f"{name} has {at} bytes instead of {len(content)}")
    return content.obj  # pyright: ignore[reportReturnType]


def _check_memo(listed: bytes) -> None:
    """Refuse a pickle that numbers an object higher than it can have objects: memory for all lower numbers would be taken."""
    for operation, argument, _ in pickletools.genops(listed):
        if operation.name not in ("PUT", "BINPUT", "LONG_BINPUT"):
            continue
        if not isinstance(argument, int) or not 0 <= argument < len(listed):
            raise ValueError(f"its list of tensors is damaged: an object has number {argument}")


class _Nothing:
    """In place of an object of an unknown kind: takes whatever it is given, and has none of it."""

    __slots__ = ()

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
        self._archive, self._folder, self._left = archive, folder, MOST_BYTES
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name == "collections.OrderedDict":
            return collections.OrderedDict
        if name == "torch._utils._rebuild_tensor_v2":
            return self._tensor
        if name == "torch._utils._rebuild_parameter":
            return _parameter
        if module_name == "torch" and global_name.endswith("Storage"):
            return global_name
        return _Nothing

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, kind, key, _, count = pid
        if kind not in _TYPES:
            raise ValueError(f"a tensor of type {kind!r}; of these, {', '.join(_TYPES)} are read")
        if key not in self._storages:
            content = _unpacked(self._archive, f"{self._folder}data/{key}")
            self._storages[key] = np.frombuffer(content, _TYPES[kind])
        numbers = self._storages[key].view(_TYPES[kind])
        if len(numbers) != count:
            raise ValueError(f"{len(numbers)} numbers stored of {count}")
        return numbers

    def _tensor(
        self, numbers: np.ndarray, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> np.ndarray:
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if (
            min((start, *shape, *strides)) < 0
            or (math.prod(shape) and last >= len(numbers))
            or math.prod(shape) > len(numbers)
        ):
            raise ValueError(f"a tensor of shape {shape} that does not fit what is stored of it")
        self._left -= math.prod(shape) * numbers.itemsize
        if self._left < 0:  # many tensors of the same numbers
            raise ValueError(f"its tensors have more than {MOST_BYTES} bytes")
        steps = tuple(stride * numbers.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(numbers[start:], shape, steps, writeable=False)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
