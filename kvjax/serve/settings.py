"""Limits of a server, and whom it answers."""

import dataclasses
import hashlib
import hmac
import os
from pathlib import Path

from kvjax._util.texts import read_text

KEY_VARIABLE = "KVJAX_API_KEY"
"""Environment variable with API keys, separated by commas or white space."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits of a server, and whom it answers.

    Attributes:
        name: name of the model for clients.
        keys: SHA-256 of each API key. Without any, no key is asked for.
        hosts: names that the `Host` header may have, besides `localhost` and IP addresses. "*" allows all.
        origins: origins of web pages that may send requests, such as "https://chat.example".
        max_body: maximum size of a request in bytes.
        max_queue: maximum number of sequences that wait for a row.
        max_messages: maximum number of messages of a chat.
        read_seconds: time for a client to send the headers of a request, and again to send its body.
        write_seconds: time for a client to take one event.
        first_seconds: time from a request to its first token.
        request_seconds: time from a request to its end.
        drain_seconds: time for running requests to end after SIGTERM.
        ping_seconds: time between comments in a stream that has no events.
        stuck_seconds: time after which a turn that has not ended means that the server is not healthy.
        reports: whether requests may ask which tokens are kept, for which programs are compiled.
        page: whether there is a web page at `/`.
    """

    name: str
    keys: frozenset[bytes] = frozenset()
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_body: int = 2 << 20
    max_queue: int = 64
    max_messages: int = 4096
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    first_seconds: float = 120.0
    request_seconds: float = 1800.0
    drain_seconds: float = 30.0
    ping_seconds: float = 15.0
    stuck_seconds: float = 60.0
    reports: bool = False
    page: bool = False

    def knows(self, key: str) -> bool:
        """Whether an API key is one of the server's. The time does not depend on the key."""
        found = False
        for known in self.keys:
            found |= hmac.compare_digest(known, digest(key))
        return found


def digest(key: str) -> bytes:
    """SHA-256 of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None) -> frozenset[bytes]:
    """Digests of the API keys in a file, one a line, and in the environment. Lines that begin with # are comments.

    Raises:
        ValueError: the file has no key.
        OSError: the file cannot be read.
    """
    keys = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    if file is not None:
        lines = [line.strip() for line in read_text(file).splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"{file}: no API key; write one per line")
        keys += found
    return frozenset(map(digest, keys))
