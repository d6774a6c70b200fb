"""Files of saved conversations: text, token ids and the cache, with checksums.

The first line has the format's version and the SHA-256 of the second. The second is the head, as JSON. The rest is the
conversation, as JSON, and the bytes of the cache's arrays, in the order of its leaves. The head has the SHA-256 of the rest.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from kvjax._util import files, user_files

MAGIC = "kvjax session 1"

MOST_BYTES = 1 << 40
"""Limit on the bytes of a file, beyond any cache."""

LONGEST_HEAD = 1 << 20
"""Maximum number of bytes of one of the first two lines."""


@dataclasses.dataclass(frozen=True)
class Head:
    """What is known of a saved conversation without reading it.

    Attributes:
        id: name of the conversation.
        owner: whose it is.
        origin: what the server was that saved it, by name.
        created: when it was begun, in seconds since 1970.
        tokens: number of its tokens.
        conversation: number of bytes of the conversation.
        arrays: type and shape of each array.
        sha256: of what follows the head.
    """

    id: str
    owner: str
    origin: Mapping[str, str]
    created: int
    tokens: int
    conversation: int
    arrays: Sequence[tuple[str, Sequence[int]]]
    sha256: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation up to the end of an answer.

    Attributes:
        ids: all tokens.
        processed: how many of them are in the cache.
        messages: all messages, as requests have them.
    """

    ids: list[int]
    processed: int
    messages: list[dict[str, Any]]


class DamagedError(ValueError):
    """A file is not what was written."""


def write(path: Path, head: Mapping[str, Any], conversation: Conversation, arrays: Sequence[np.ndarray]) -> Head:
    """Write a file atomically: it is there as a whole or as it was before.

    Args:
        path: the file.
        head: the fields of `Head` from `id` to `tokens`.
        conversation: the conversation.
        arrays: the cache's arrays.

    Raises:
        OSError: it cannot be written.
    """
    said = _text(conversation)
    digest = hashlib.sha256(said)
    parts = [memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in arrays]  # pyright: ignore[reportArgumentType]
    for part in parts:
        digest.update(part)
    made = Head(
        **head,
        conversation=len(said),
        arrays=[(x.dtype.name, list(x.shape)) for x in arrays],
        sha256=digest.hexdigest(),
    )
    line = json.dumps(dataclasses.asdict(made)).encode()
    with files.writing(path) as stream:
        stream.write(f"{MAGIC} {hashlib.sha256(line).hexdigest()}\n".encode() + line + b"\n" + said)
        for part in parts:
            stream.write(part)
    return made


def text_bytes(conversation: Conversation) -> int:
    """Number of bytes of a file besides the arrays and the head, which is short."""
    return len(_text(conversation))


def _text(conversation: Conversation) -> bytes:
    return json.dumps(dataclasses.asdict(conversation)).encode()


def read_head(path: Path) -> Head:
    """Read the head of a file.

    Raises:
        DamagedError: the file is damaged, or not one of these.
        OSError: it cannot be read.
    """
    with user_files.opened(path, MOST_BYTES) as stream:
        return _head(stream, path)


def read(path: Path) -> tuple[Head, Conversation, list[np.ndarray]]:
    """Read a file.

    Raises:
        DamagedError, OSError: as `read_head`.
    """
    with user_files.opened(path, MOST_BYTES) as stream:
        head, rest = _head(stream, path), stream.read()
    if hashlib.sha256(rest).hexdigest() != head.sha256:
        raise DamagedError(f"{path}: the checksum of what follows the head differs")
    return head, Conversation(**json.loads(rest[: head.conversation])), list(_arrays(head, rest))


def _head(stream: BinaryIO, path: Path) -> Head:
    first, line = (stream.readline(LONGEST_HEAD).removesuffix(b"\n") for _ in range(2))
    if not first.startswith(MAGIC.encode() + b" "):
        raise DamagedError(f"{path}: not a session of this version of kvjax")
    if first.decode("ascii", "replace") != f"{MAGIC} {hashlib.sha256(line).hexdigest()}":
        raise DamagedError(f"{path}: the checksum of the head differs")
    return Head(**json.loads(line))


def _arrays(head: Head, rest: bytes) -> Iterator[np.ndarray]:
    at = head.conversation
    for name, shape in head.arrays:
        kind, count = jnp.dtype(name), int(np.prod(shape, dtype=np.int64))
        yield np.frombuffer(rest, kind, count, at).reshape(shape)
        at += count * kind.itemsize
