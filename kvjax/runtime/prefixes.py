"""`Prefixes`: states of beginnings that prompts share, so that each is prefilled once.

With chunked prefill, the state after some whole blocks follows from their tokens. A prompt that begins with the same blocks
goes on from a copy of it. Its tokens are bit for bit those that it gets without.

The device has room for few states. Those that it drops can be kept in host memory, from where they come back when a
prompt needs them.
"""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from kvjax.policies import Policy

Anchor = Literal["start", "end"]

BORDERS = 1 << 14
"""Number of beginnings that are remembered without their states."""


class Plan(NamedTuple):
    """What a prompt can take from the stored states, and what it should leave.

    Attributes:
        done: number of first blocks whose state is stored.
        state: that state; None if there is none.
        keep: number of first blocks after which the state is to be stored; 0 for none.
    """

    done: int
    state: Any
    keep: int


class Prefixes:
    """Stored states, and the beginnings that have been seen. The least recently used ones are dropped.

    A state is stored at the last block border that a prompt shares with an earlier one, when the border is met for the
    second time. So prompts that share nothing cost nothing.

    Args:
        most: maximum number of states on the device.
        host_bytes: maximum size of the states in host memory.

    Attributes:
        stored_bytes: size of the states in host memory.
        restored: number of states that came back from host memory so far.
    """

    def __init__(self, most: int, host_bytes: int = 0) -> None:
        self.most, self.host_bytes = most, host_bytes
        self.stored_bytes = self.restored = 0
        self._states: OrderedDict[bytes, Any] = OrderedDict()
        self._stored: OrderedDict[bytes, _Stored] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def on_host(self) -> int:
        """Number of states in host memory."""
        return len(self._stored)

    def plan(self, keys: Sequence[bytes]) -> Plan:
        """What to do for a prompt.

        Args:
            keys: a key for each beginning of whole blocks, the shortest first.
        """
        counts = range(len(keys), 0, -1)
        done = next((n for n in counts if keys[n - 1] in self._states or keys[n - 1] in self._stored), 0)
        seen = next((n for n in counts if keys[n - 1] in self._seen), 0)
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > BORDERS:
            self._seen.popitem(last=False)
        return Plan(done, self._take(keys[done - 1]) if done else None, seen if seen > done else 0)

    def put(self, key: bytes, state: Any) -> None:
        """Store a state."""
        self._pop_stored(key)
        self._states[key] = state
        self._states.move_to_end(key)
        self._make_room(0)

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
        self._stored.clear()
        self._seen.clear()
        self.stored_bytes = 0

    def _take(self, key: bytes) -> Any:
        """A stored state, which is then on the device and the most recently used one."""
        if (stored := self._pop_stored(key)) is not None:
            self._make_room(1)
            self._states[key] = stored.on_device()
            self.restored += 1
        self._states.move_to_end(key)
        return self._states[key]

    def _make_room(self, count: int) -> None:
        """Move the least recently used states to host memory, until there is room for so many on the device."""
        while len(self._states) > self.most - count:
            key, state = self._states.popitem(last=False)
            if self.host_bytes:
                self._stored[key] = stored = _Stored.of(state)
                self.stored_bytes += stored.size
        while self.stored_bytes > self.host_bytes:
            self._pop_stored(next(iter(self._stored)))

    def _pop_stored(self, key: bytes) -> "_Stored | None":
        """Take a state out of host memory; None if it is not there."""
        stored = self._stored.pop(key, None)
        self.stored_bytes -= 0 if stored is None else stored.size
        return stored


class _Stored(NamedTuple):
    """A state in host memory.

    Attributes:
        arrays: its arrays, as the host has them.
        places: the sharding of each on the devices.
        tree: how they are put together.
    """

    arrays: list[Any]
    places: list[Any]
    tree: Any

    @classmethod
    def of(cls, state: Any) -> "_Stored":
        leaves, tree = jax.tree.flatten(state)
        for leaf in leaves:
            leaf.copy_to_host_async()
        # Copied, as on a CPU both sides may otherwise share memory: each state would keep all that it was before alive.
        return cls([np.array(leaf) for leaf in leaves], [leaf.sharding for leaf in leaves], tree)

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def on_device(self) -> Any:
        """The state, bit for bit, where it was."""
        return self.tree.unflatten(jax.device_put(self.arrays, self.places))


def blocks_from_start(prompt: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split a prompt into blocks of `size` tokens, of which the last but one may be shorter.

    So equal beginnings of prompts have equal blocks. The last tokens are in one block, as many policies select by them.
    """
    length = len(prompt)
    whole = range(size, length - size + 1, size)
    borders = sorted({*whole, max(length - size, 0), length} - {0})
    return [prompt[start:end] for start, end in zip([0, *borders[:-1]], borders, strict=True)]


def keys_of(blocks: Sequence[Sequence[int]], size: int, *shared: Any) -> list[bytes]:
    """A key for each beginning of whole blocks, without the last block.

    Args:
        blocks: the blocks of a prompt.
        size: number of tokens of a whole block.
        shared: what else the states depend on, or who may use them.
    """
    found, key = [], hashlib.sha256(repr(shared).encode()).digest()
    for block in blocks[:-1]:
        if len(block) < size:
            break
        key = hashlib.sha256(key + np.asarray(block, np.int32).tobytes()).digest()
        found.append(key)
    return found


def has_fractions(policy: Any) -> bool:
    """Whether a policy may have sizes that are fractions of a sequence's length, so that states depend on that length.

    Any number between 0 and 1 counts, whatever it means.
    """
    if isinstance(policy, float):
        return 0 < policy < 1
    if isinstance(policy, tuple):
        return any(map(has_fractions, policy))
    if isinstance(policy, Policy) or dataclasses.is_dataclass(policy):
        return any(has_fractions(getattr(policy, field.name)) for field in dataclasses.fields(policy))  # pyright: ignore[reportArgumentType]
    return False
