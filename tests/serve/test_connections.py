"""Connections of clients that are slow, or speak no HTTP."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from serve_client import Client

from kvjax.serve.protocol import within

SECONDS = 1.0


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncGenerator[int]:
    """The port of an app on a socket."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=within(SECONDS), ws="none", lifespan="off", log_level="critical")
    server: Any = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.ensure_future(server.serve(sockets=[place]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield place.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and JSON of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def test_clients_without_headers_are_disconnected(client: Client) -> None:
    """At once or after a request, whether they send nothing, or a byte at a time."""

    async def end_of(port: int, first: bytes, trickle: bytes) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if first:
            writer.write(first)
            assert await answer(reader) == (200, {"status": "ok"})
        begun, read = asyncio.get_running_loop().time(), asyncio.ensure_future(reader.read())
        while not read.done():
            writer.write(trickle)
            await asyncio.wait({read}, timeout=SECONDS / 8)
        with contextlib.suppress(ConnectionResetError):  # a byte was on its way
            assert (await read) == b""
        writer.close()
        return asyncio.get_running_loop().time() - begun

    async def run() -> list[float]:
        async with listening(client.app) as port:
            cases = [(b"", b""), (b"", b"G"), (HEALTH, b"G")]
            return list(await asyncio.wait_for(asyncio.gather(*(end_of(port, *case) for case in cases)), 30))

    assert min(client.run(run())) >= SECONDS * 0.9


def test_slow_clients_are_answered_in_time(client: Client) -> None:
    """And what is no HTTP is refused as JSON."""

    async def run() -> list[tuple[int, Any]]:
        async with listening(client.app) as port:
            found: list[tuple[int, Any]] = []
            for data in (HEALTH, b"nonsense\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for at in range(0, len(data), 16):
                    writer.write(data[at : at + 16])
                    await asyncio.sleep(SECONDS / 40)
                found.append(await answer(reader))
                writer.close()
            return found

    good, bad = client.run(run())
    assert good == (200, {"status": "ok"})
    assert (bad[0], bad[1]["error"]["type"]) == (400, "invalid_request_error")
