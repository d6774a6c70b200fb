"""A server of a tiny model, called without sockets."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from kvjax.models import Params
from kvjax.runtime.batch import Batch
from kvjax.serve.app import make_app
from kvjax.serve.serving import Server
from kvjax.serve.sessions import Sessions
from kvjax.serve.settings import Settings

ROWS, TOTAL, NEW = 4, 120, 24
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass
class Reply:
    """A response as it was received: status, headers, and the parts of its body."""

    status: int
    headers: dict[str, str]
    parts: list[bytes]

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """Data of the events of a stream; the last may be text."""
        blocks = [block for block in self.text.split("\n\n") if block.startswith("data: ")]
        data = [block.removeprefix("data: ") for block in blocks]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class Client:
    """Calls an ASGI app in an event loop of its own thread, as a web server does."""

    def __init__(self, server_of: Callable[[], Server]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = server_of()
        self.app: Any = make_app(self.server)

    def run(self, work: Any, timeout: float = 300.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def begin(self) -> None:
        """Start the app, and wait until it is ready."""
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        work = self.app({"type": "lifespan", "asgi": {"version": "3.0"}}, self._messages.get, self._told.put)
        self._lifespan = asyncio.run_coroutine_threadsafe(work, self.loop)
        self.run(self._messages.put({"type": "lifespan.startup"}))
        assert self.run(self._told.get())["type"] == "lifespan.startup.complete"

    def end(self) -> None:
        self.run(self._messages.put({"type": "lifespan.shutdown"}))
        assert self.run(self._told.get())["type"] == "lifespan.shutdown.complete"
        self._lifespan.result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        leave_after: int | None = None,
        send: Any = None,
    ) -> Reply:
        """Send a request. With `leave_after`, close the connection after that many parts of the response.

        `send` receives the response instead.
        """
        given = {"host": "localhost", "content-type": "application/json"} | (headers or {})
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        sent, gone = [{"type": "http.request", "body": content, "more_body": False}], asyncio.Event()
        reply = Reply(0, {}, [])

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def take(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.parts.append(message["body"])
                if leave_after is not None and len(reply.parts) >= leave_after:
                    gone.set()

        if leave_after == 0:
            gone.set()
        await self.app(scope, receive, send or take)
        return reply

    def get(self, path: str, **options: Any) -> Reply:
        return self.run(self.call("GET", path, **options))

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return self.run(self.call("POST", path, body, **options))

    def posts(self, path: str, bodies: list[Any]) -> list[Reply]:
        """Send requests at the same time."""

        async def all_of() -> list[Reply]:
            return list(await asyncio.gather(*(self.call("POST", path, body) for body in bodies)))

        return self.run(all_of())

    def wait_until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.005)

        self.run(wait())


@contextlib.contextmanager
def serving(
    params: Params,
    policy: str = "treekv:32",
    *,
    rows: int = ROWS,
    block: int | None = None,
    steps: int = 4,
    new: int = NEW,
    sampling: Sequence[str] = SAMPLING,
    prefixes: int = 0,
    prefix_host_bytes: int = 0,
    idle: bool = False,
    folder: Path | None = None,
    limit: int = 1 << 30,
    **settings: Any,
) -> Iterator[Client]:
    """A client of a server that is ready. With `idle` it compiles nothing, and no request runs.

    With `folder`, it saves sessions there, up to `limit` bytes.
    """
    sizes: dict[str, Any] = {"rows": rows, "prompt_len": TOTAL - NEW, "max_new_tokens": new, "block": block}
    sizes |= {"anchor": "start", "prefixes": prefixes, "prefix_host_bytes": prefix_host_bytes}

    def server() -> Server:
        batch = Batch(params, policy, **sizes, sampling=sampling, masked=True, tops=True)
        sessions = None if folder is None else Sessions(folder, limit, batch)
        made = Server(params, batch, Settings(**{"name": "tiny"} | settings), steps=steps, sessions=sessions)
        if idle:
            made.worker.start = lambda: setattr(made.worker, "phase", "ready")
        return made

    client = Client(server)
    client.begin()
    try:
        client.wait_until(lambda: client.server.worker.phase != "starting")
        assert client.server.worker.phase == "ready", client.server.worker.error
        yield client
    finally:
        client.end()
