"""Reads tensors from a file of `torch.save`, without torch and without running anything in the file.

Such a file is a zip archive with a pickle, which describes the tensors, and the bytes of each tensor. A pickle can call
any function. Here, only functions that assemble tensors are supported, with implementations in this module. Everything
else is replaced by an empty object.

A small file can claim, or unpack to, any number of bytes. Limits are checked before anything is unpacked.
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
"""Limit on the bytes of a file, of its unpacked contents, and of its tensors. Published weights of policies are smaller."""

_PICKLE_BYTES = 1 << 22
"""Limit on the bytes of the pickle, whose objects take up to a hundred times as much. A model with a hundred thousand parameters needs less.
"""

_ENTRIES = 1 << 16
"""Limit on the entries of the archive, one per tensor."""

_ENTRY = b"PK\x01\x02"
"""Signature of each entry in the archive's directory."""

_METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
"""Compression methods that can be unpacked within limits. torch itself does not compress."""

_PIECE = 1 << 20
"""Bytes unpacked at a time."""


def read(path: Path) -> Any:
    """Read what was saved: dictionaries, lists and numbers, with tensors as read-only NumPy arrays. Other objects are empty.

    Raises:
        ValueError: the file is not such a file, is damaged, has unsupported tensor types, or has more than
            `MOST_BYTES`.
        OSError: the file cannot be read.
    """
    try:
        _check_size(path)
        with zipfile.ZipFile(path) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > MOST_BYTES:
                raise ValueError(f"it unpacks to {size} bytes; at most {MOST_BYTES} are read")
            if any(entry.compress_type not in _METHODS for entry in archive.infolist()):
                raise ValueError("it is compressed, but not with deflate")
            (found,) = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            folder = found.removesuffix("data.pkl")
            if (
                folder + "byteorder" in archive.namelist()
                and bytes(_unpacked(archive, folder + "byteorder")) != b"little"
            ):
                raise ValueError("its numbers are not little-endian")
            if (size := archive.getinfo(found).file_size) > _PICKLE_BYTES:
                raise ValueError(f"its list of tensors has {size} bytes; at most {_PICKLE_BYTES} are read")
            listed = bytes(_unpacked(archive, found))
            _check_memo(listed)
            return _Reader(io.BytesIO(listed), archive, folder).load()
    except OSError:
        raise
    except Exception as error:  # a damaged archive or pickle can raise anything
        raise ValueError(
            f"{path} is not a readable file of torch.save ({error or type(error).__name__}); give one that torch 1.6 or newer wrote"
        ) from None


def _check_size(path: Path) -> None:
    """Raise if the file is too large, or its archive has too many entries, as each becomes an object."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
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
    """Unpack an entry in pieces, up to the size in the archive's directory, which may be wrong."""
    content, at = memoryview(bytearray(archive.getinfo(name).file_size)), 0
    with archive.open(name) as stream:
        while part := stream.read(_PIECE):
            content[at : at + len(part)] = part
            at += len(part)
    if at != len(content):
        raise ValueError(f"{name} has {at} bytes instead of {len(content)}")
    return content.obj  # pyright: ignore[reportReturnType]


def _check_memo(listed: bytes) -> None:
    """Raise if a pickle numbers an object higher than its number of objects, as memory for all lower numbers would be allocated."""
    for operation, argument, _ in pickletools.genops(listed):
        if operation.name not in ("PUT", "BINPUT", "LONG_BINPUT"):
            continue
        if not isinstance(argument, int) or not 0 <= argument < len(listed):
            raise ValueError(f"its list of tensors is damaged: an object has number {argument}")


class _Nothing:
    """Replaces an object of an unsupported type: accepts all calls and data, and stores nothing."""

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
        if self._left < 0:  # many tensors may share the same numbers
            raise ValueError(f"its tensors have more than {MOST_BYTES} bytes")
        steps = tuple(stride * numbers.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(numbers[start:], shape, steps, writeable=False)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor
