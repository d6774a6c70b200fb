"""`TokenIds`: the token ids of a prompt, stored as an array."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np


class TokenIds(Sequence[int]):
    """Token ids that behave like a list of `int` and convert to a NumPy array without a pass over all ids in Python.

    Args:
        ids: whole numbers [T] that fit into 32 bits. They are copied.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Any) -> None:
        self._ids = np.array(ids, np.int32)
        self._ids.flags.writeable = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The ids as an array, read-only unless it is copied."""
        if dtype is None or dtype == self._ids.dtype:
            return self._ids.copy() if copy else self._ids
        return self._ids.astype(dtype)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        """One id, or a list of ids."""
        return self._ids[index].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __add__(self, other: Sequence[int]) -> list[int]:
        return [*self, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        """Whether the other is a list, tuple or `TokenIds` of the same ids."""
        if not isinstance(other, TokenIds | list | tuple):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return repr(self._ids.tolist())
