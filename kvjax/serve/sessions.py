"""Conversations that outlive the server: saved after each answer, and continued from what was saved.

Each belongs to an API key, and has a limit in bytes with the key's others: the one that was used least recently is deleted.
Requests name conversations; names are looked up here, and never become paths.
"""

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax._version import __version__
from kvjax.runtime.batch import Batch, Begun
from kvjax.runtime.origin import sample_of

from . import session_file
from .errors import APIError
from .session_file import Conversation, DamagedError
from .settings import digest

log = logging.getLogger(__name__)

NEW = "new"
"""Asks for a new session."""

ENDING = ".session"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A saved conversation, as it is listed.

    Attributes:
        id, owner, created, tokens: as in `session_file.Head`.
        bytes: size of its file.
        used: when it was saved, in nanoseconds since 1970.
    """

    id: str
    owner: str
    created: int
    tokens: int
    bytes: int
    used: int

    @property
    def public(self) -> dict[str, Any]:
        """What clients learn of it."""
        fields = {"id": self.id, "object": "session", "created": self.created}
        return fields | {"saved": self.used // 10**9, "tokens": self.tokens, "bytes": self.bytes}


class Sessions:
    """Saved conversations of a server. May be used by several threads, but by one server.

    Args:
        folder: where the files are. It is made if it is not there.
        limit: maximum number of bytes of the files of an API key.
        batch: the server's batch, whose rows are saved.

    Raises:
        ValueError: not even one conversation fits the limit.
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, limit: int, batch: Batch) -> None:
        self._folder, self.limit = folder, limit
        self._like = tuple(jax.eval_shape(batch.policy.layer(spec.whole).init) for spec in batch.reader)
        self._origin = _origin(batch)
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._busy: set[str] = set()
        least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._like))
        if limit < least:
            raise ValueError(f"the cache of one conversation has {least} bytes, more than all sessions may, {limit}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob(f"*{ENDING}"):
            self._find(path)

    def _find(self, path: Path) -> None:
        try:
            head, found = session_file.read_head(path), path.stat()
            if path.name != head.id + ENDING:
                raise DamagedError(f"{path}: has the session {head.id}")
        except (OSError, ValueError) as error:
            log.warning("a session is left out: %s", error)
            return
        self._entries[head.id] = Entry(head.id, head.owner, head.created, head.tokens, found.st_size, found.st_mtime_ns)

    def listed(self, client: str) -> list[dict[str, Any]]:
        """A client's sessions, the one that was saved last first."""
        owner = _owner(client)
        with self._lock:
            own = [entry for entry in self._entries.values() if entry.owner == owner]
        return [entry.public for entry in sorted(own, key=lambda entry: -entry.used)]

    def one(self, client: str, name: str) -> dict[str, Any]:
        """A client's session, with its messages."""
        with self._lock:
            entry = self._entry(client, name)
        return entry.public | {"messages": self.read(entry)[0].messages}

    def delete(self, client: str, name: str) -> None:
        """Delete a client's session.

        Raises:
            APIError: there is none, or a request uses it.
        """
        with self._lock:
            entry = self._entry(client, name)
            self._check_idle(entry)
            self._drop(entry)

    @contextlib.contextmanager
    def use(self, client: str, name: str) -> Iterator["Use"]:
        """Continue a client's session, or with `NEW` begin one. Nobody else may meanwhile.

        Raises:
            APIError: there is none, or a request uses it.
        """
        with self._lock:
            entry = None if name == NEW else self._entry(client, name)
            if entry is not None:
                self._check_idle(entry)
            use = Use(self, client, entry)
            self._busy.add(use.id)
        try:
            yield use
        finally:
            with self._lock:
                use.left = True
                self._free(use)

    def _free(self, use: "Use") -> None:
        """Let others use a session, once its request has ended and nothing is being saved."""
        if use.left and not use.saving:
            self._busy.discard(use.id)

    def _entry(self, client: str, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None or entry.owner != _owner(client):
            raise APIError(404, "there is no such session", param="session", code="session_not_found")
        return entry

    def _check_idle(self, entry: Entry) -> None:
        if entry.id in self._busy:
            raise APIError(409, "another request uses this session now", param="session", code="session_busy")

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.id]
        self._path(entry.id).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        """The file of a session whose name was made here."""
        return self._folder / f"{name}{ENDING}"

    def read(self, entry: Entry) -> tuple[Conversation, tuple[Any, ...]]:
        """A conversation and its cache."""
        try:
            head, conversation, arrays = session_file.read(self._path(entry.id))
        except (OSError, DamagedError) as error:
            log.warning("a session cannot be read: %s", error)
            damaged = "the file of this session is damaged; delete the session, and begin another one"
            raise APIError(409, damaged, param="session", code="session_damaged") from error
        wanted = [(x.dtype.name, x.shape) for x in jax.tree.leaves(self._like)]
        differ = [name for name, value in self._origin.items() if head.origin.get(name) != value]
        if differ or [(x.dtype.name, x.shape) for x in arrays] != wanted:
            what = " and ".join(differ or ["sizes"])
            other = (
                f"this session was saved by a server with another value of {what}; its cache cannot be continued here"
            )
            raise APIError(409, other, param="session", code="session_of_another_server")
        return conversation, jax.tree.unflatten(jax.tree.structure(self._like), arrays)

    def save(self, use: "Use", conversation: Conversation, caches: tuple[Any, ...]) -> Entry:
        """Save a conversation, see `Use.save`."""
        with self._lock:
            use.saving = True
        try:
            return self._save(use, conversation, caches)
        except OSError as error:
            log.exception("a session cannot be saved")
            failed = "the session could not be saved; see the server's log"
            raise APIError(500, failed, "server_error", code="session_not_saved") from error
        finally:
            with self._lock:
                use.saving = False
                self._free(use)

    def _save(self, use: "Use", conversation: Conversation, caches: tuple[Any, ...]) -> Entry:
        arrays = [np.asarray(x) for x in jax.tree.leaves(caches)]
        created = int(time.time()) if use.entry is None else use.entry.created
        head = {"id": use.id, "owner": _owner(use.client), "origin": self._origin, "created": created}
        path = self._path(use.id)
        self._make_room(use, sum(x.nbytes for x in arrays) + session_file.text_bytes(conversation))
        session_file.write(path, head | {"tokens": len(conversation.ids)}, conversation, arrays)
        found = path.stat()
        entry = Entry(use.id, head["owner"], created, len(conversation.ids), found.st_size, found.st_mtime_ns)
        with self._lock:
            self._entries[use.id] = entry
        return entry

    def _make_room(self, use: "Use", size: int) -> None:
        """Delete a client's sessions that were used least recently, until another one fits."""
        owner = _owner(use.client)
        with self._lock:
            own = [entry for entry in self._entries.values() if entry.owner == owner and entry.id != use.id]
            total = size + sum(entry.bytes for entry in own)
            for entry in sorted(own, key=lambda entry: entry.used):
                if total > self.limit and entry.id not in self._busy:
                    self._drop(entry)
                    total -= entry.bytes
        if total > self.limit:
            raise APIError(
                507,
                f"the session has {size} bytes, too many for the limit of {self.limit}",
                "server_error",
                code="session_not_saved",
            )


class Use:
    """A session that a request continues, or begins.

    Attributes:
        id: its name.
        saving: whether it is being saved, by a thread that goes on if the request ends meanwhile.
        left: whether the request has ended.

    Args:
        sessions: where it is saved.
        client: the request's client.
        entry: what is saved; None for a new session.
    """

    def __init__(self, sessions: Sessions, client: str, entry: Entry | None) -> None:
        self.sessions, self.client, self.entry = sessions, client, entry
        self.id = secrets.token_hex(16) if entry is None else entry.id
        self.saving = self.left = False

    def load(self) -> tuple[Conversation, Begun] | None:
        """What is saved; None for a new session.

        Raises:
            APIError: the file is damaged, or another kind of server has saved it.
        """
        if self.entry is None:
            return None
        conversation, caches = self.sessions.read(self.entry)
        return conversation, Begun(caches, conversation.processed)

    def save(self, conversation: Conversation, caches: tuple[Any, ...]) -> dict[str, Any]:
        """Save the conversation in place of what was saved.

        Returns:
            What clients learn of it.

        Raises:
            APIError: it does not fit the limit, or cannot be written. What was saved before remains.
        """
        return self.sessions.save(self, conversation, caches).public


def _owner(client: str) -> str:
    """Whose sessions those of a client are, as files say it. API keys cannot be guessed from it any better than from `client`."""
    return digest(f"kvjax session {client}").hex()


def _origin(batch: Batch) -> dict[str, str]:
    """What the bits of a continuation depend on."""
    spec = batch.specs[0]
    sizes = batch.rows, spec.prompt_len, spec.new_tokens, batch.engine.block
    shard = spec.shard
    return {
        "kvjax": __version__,
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind}, {shard.heads} x {shard.copies} x {shard.slots}",
        "model": f"{digest(repr(batch.engine.config)).hex()} {sample_of(batch.weights)}",
        "policy": str(batch.policy),
        "sizes": repr((*sizes, spec.dtype.name)),
    }
