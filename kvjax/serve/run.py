"""Runs a server on a socket until a signal ends it."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from .app import make_app
from .protocol import within
from .serving import Server

CONNECTIONS = 256
"""Connections beside those of sequences that run or wait. More are refused."""

SWITCH_SECONDS = 2e-4
"""Python's switch interval in seconds. The thread that drives the devices waits at most about this long for one that handles connections."""


def run(server: Server, host: str, port: int, on_ready: Callable[[], object] = lambda: None) -> bool:
    """Serve until SIGTERM or Ctrl-C. Then no more requests are taken, and running ones may end.

    A second signal ends all at once.

    Args:
        server: the server.
        host, port: the address to listen on.
        on_ready: called once all programs are compiled.

    Returns:
        Whether all went well.
    """
    config = uvicorn.Config(
        make_app(server),
        host,
        port,
        http=within(server.settings.read_seconds),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        limit_concurrency=server.most + CONNECTIONS,
        timeout_graceful_shutdown=max(int(server.settings.drain_seconds), 1),
        log_level="warning",
    )
    running, before = _Uvicorn(config, server, on_ready), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        running.run()
    finally:
        sys.setswitchinterval(before)
    return running.started and server.worker.error is None


class _Uvicorn(uvicorn.Server):
    """Ends also when the worker fails, tells the server about signals, and says when all programs are compiled."""

    def __init__(self, config: uvicorn.Config, server: Server, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._server, self._on_ready, self._told = server, on_ready, False

    async def on_tick(self, counter: int) -> bool:
        """Whether to end. Called ten times a second."""
        if self._server.worker.phase == "ready" and not self._told:
            self._told = True
            self._on_ready()
        return await super().on_tick(counter) or self._server.worker.phase == "failed"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it runs. Unlike uvicorn's own, they are not raised again, as a drained server has ended well."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handle a signal."""
        self._server.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True
