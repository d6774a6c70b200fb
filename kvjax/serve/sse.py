"""Server-sent events, and work that ends when its client goes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

from .errors import APIError
from .guard import Receive, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class ClientGoneError(Exception):
    """The client has closed the connection, or reads too slowly."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, which is cancelled if the client closes the connection.

    Raises:
        ClientGoneError: the client has closed the connection.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    """One event with JSON data."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """A response of events, which ends with `[DONE]`.

    It begins with the first event, so that an earlier error is a response of its own. A later error is an event, without
    `[DONE]` after it.

    Args:
        events: data of the events, for JSON. It is closed when the response ends, for whatever reason.
        ping_seconds: time without events after which a comment is sent.
        write_seconds: time that the client may take for one event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any], *, ping_seconds: float, write_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._ping_seconds, self._write_seconds = events, ping_seconds, write_seconds
        self._began = False

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send the events."""
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Any, receive: Receive, send: Send) -> None:
        step: asyncio.Future[Any] | None = None
        try:
            while True:
                step = step or asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait({step}, timeout=self._ping_seconds)
                if not done:
                    await self._write(send, PING)
                    continue
                try:
                    data = step.result()
                except StopAsyncIteration:
                    break
                finally:
                    step = None
                await self._write(send, event(data))
            await self._write(send, DONE, more=False)
        except APIError as error:
            if self._began:
                await self._write(send, event(error.body), more=False)
            else:
                await error.response()(scope, receive, send)
        finally:
            if step is not None:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            await self._events.aclose()

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                if not self._began:
                    self._began = True
                    start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    await send(start)
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None
