"""HTTP/1.1 for clients that may be slow: those that do not send their headers in time are disconnected.

Uvicorn limits only the time between two requests of a connection. Without more, a few hundred clients that send nothing
would take all connections.
"""

import asyncio
import functools
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError


def within(seconds: float) -> Any:
    """The protocol of a server that gives clients `seconds` to send their headers, for `uvicorn.Config(http=)`."""
    return functools.partial(_Protocol, seconds)


class _Protocol(H11Protocol):
    """A connection.

    Args:
        seconds: time for the headers of a request, from its first byte, or from the beginning of the connection.
        options: as uvicorn has them.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """A client has sent something."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect_headers()
        else:
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's format, and close the connection."""
        body = json.dumps(APIError(400, msg).body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        reason = "Bad Request"
        events: list[Any] = [
            h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=reason.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._seconds, self.transport.close)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
