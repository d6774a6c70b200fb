"""How requests end: by their clients, by limits, by failures, and when the server ends."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serve_client import NEW, ROWS, Client, serving

from kvjax.models import Params

LONG = {"prompt": [1, 2, 3], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}


class Calls:
    """Counts the decode calls of a server's batch, and makes them slow or fail."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.seconds, self.fails = 0, 0.05, 0
        batch, serve = client.server.batch, client.server.batch.serve

        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            time.sleep(self.seconds)
            if self.fails:
                self.fails -= 1
                raise RuntimeError("the device is gone")
            return serve(*args, **options)

        monkeypatch.setattr(batch, "serve", counted)


@pytest.fixture
def calls(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Slow decode calls of the shared server, on which nothing runs before and after."""
    client.wait_until(lambda: not client.server.worker.scheduler.busy)
    yield Calls(client, monkeypatch)
    client.wait_until(lambda: not client.server.worker.scheduler.busy)
    assert client.server.admitted == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows_within_two_calls(client: Client, calls: Calls, stream: bool) -> None:
    scheduler, calls.seconds = client.server.worker.scheduler, 0.3
    cancel, at = client.server.worker._cancel, []
    client.server.worker._cancel = lambda owners: (at.append(calls.count), cancel(owners))[1]

    async def leave() -> None:
        task = asyncio.ensure_future(client.call("POST", "/v1/completions", LONG | {"n": 2, "stream": stream}))
        while not scheduler.running:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    try:
        if stream:
            assert client.post("/v1/completions", LONG | {"n": 2, "stream": True}, leave_after=1).status == 200
        else:
            client.run(leave())
        client.wait_until(lambda: not scheduler.running)
    finally:
        client.server.worker._cancel = cancel
    assert len(at) == 1
    assert calls.count - at[0] <= 2


def test_a_plain_request_whose_client_leaves(client: Client, calls: Calls) -> None:
    calls.seconds = 0.3
    reply = client.post("/v1/completions", LONG, leave_after=0)
    assert reply.status in (0, 499)
    client.wait_until(lambda: not client.server.worker.scheduler.busy)
    assert calls.count < NEW // 4


def test_neighbours_of_a_client_that_leaves_are_not_disturbed(client: Client, calls: Calls) -> None:
    alone = client.post("/v1/completions", LONG).json["choices"][0]["text"]

    async def both() -> Any:
        gone = client.call("POST", "/v1/completions", LONG | {"stream": True}, leave_after=1)
        _, other = await asyncio.gather(gone, client.call("POST", "/v1/completions", LONG))
        return other

    assert client.run(both()).json["choices"][0]["text"] == alone


def test_a_failed_call_is_an_error_and_the_server_goes_on(client: Client, calls: Calls) -> None:
    alone = client.post("/v1/completions", LONG).json["choices"][0]["text"]
    calls.fails = 1
    reply = client.post("/v1/completions", LONG)
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert "device" not in reply.text
    calls.fails = 1
    streamed = client.post("/v1/completions", LONG | {"stream": True, "max_tokens": 2, "prompt": [1]})
    assert streamed.events[-1]["error"]["type"] == "server_error" if streamed.status == 200 else streamed.status == 500
    assert client.post("/v1/completions", LONG).json["choices"][0]["text"] == alone
    assert client.get("/health").status == 200


def test_an_error_within_a_stream_is_its_last_event(client: Client, calls: Calls) -> None:
    calls.seconds = 0.2

    async def fail_later() -> Any:
        task = asyncio.ensure_future(client.call("POST", "/v1/completions", LONG | {"stream": True}))
        while calls.count < 2:
            await asyncio.sleep(0.005)
        calls.fails = 1
        return await task

    reply = client.run(fail_later())
    *chunks, last = reply.events
    assert (reply.status, last["error"]["type"]) == (200, "server_error")
    assert chunks[0]["choices"][0]["finish_reason"] is None


def test_what_exceeds_the_queue_is_refused_at_once(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters, max_queue=2) as client:
        Calls(client, monkeypatch)
        begun = time.monotonic()
        replies = client.posts("/v1/completions", [LONG] * (ROWS + 2 + 3))
        assert sorted(reply.status for reply in replies) == [200] * (ROWS + 2) + [503] * 3
        for reply in replies:
            if reply.status == 503:
                assert reply.headers["retry-after"].isdecimal()
                assert reply.json["error"]["code"] == "overloaded"
        assert len({reply.text for reply in replies if reply.status == 503}) == 1
        assert time.monotonic() - begun < 60
        assert client.post("/v1/completions", LONG | {"n": ROWS + 3}).status == 400


def test_requests_that_begin_too_late(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters, first_seconds=0.4) as client:
        calls = Calls(client, monkeypatch)
        calls.seconds = 0.3
        replies = client.posts("/v1/completions", [LONG] * (ROWS + 1))
        assert any(reply.status == 503 and "has not begun after 0.4 seconds" in reply.text for reply in replies)
        client.wait_until(lambda: not client.server.worker.scheduler.busy)
        assert client.server.admitted == 0


def test_requests_that_take_too_long(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters, request_seconds=0.6) as client:
        calls = Calls(client, monkeypatch)
        calls.seconds = 0.3
        reply = client.post("/v1/completions", LONG)
        assert (reply.status, "has not ended after 0.6 seconds" in reply.text) == (503, True)
        streamed = client.post("/v1/completions", LONG | {"stream": True})
        assert streamed.events[-1]["error"]["code"] == "overloaded"
        client.wait_until(lambda: not client.server.worker.scheduler.busy)
        assert client.server.admitted == 0


def test_a_reader_that_takes_no_events_is_dropped(letters: Params) -> None:
    with serving(letters, write_seconds=0.2) as client:

        async def stuck() -> None:
            async def send(_: Any) -> None:
                await asyncio.sleep(60)

            await client.call("POST", "/v1/completions", LONG | {"stream": True}, send=send)

        begun = time.monotonic()
        client.run(stuck())
        client.wait_until(lambda: client.server.admitted == 0 and not client.server.worker.scheduler.busy)
        assert time.monotonic() - begun < 30


def test_a_quiet_stream_has_comments(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters, ping_seconds=0.05) as client:
        Calls(client, monkeypatch).seconds = 0.4
        reply = client.post("/v1/completions", LONG | {"stream": True, "max_tokens": 8})
        assert b": ping\n\n" in reply.parts
        assert reply.events[-1] == "[DONE]"


def test_a_server_that_ends_finishes_what_runs(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters) as client:
        calls = Calls(client, monkeypatch)

        async def drain() -> tuple[Any, Any, Any]:
            running = asyncio.ensure_future(client.call("POST", "/v1/completions", LONG))
            while not calls.count:
                await asyncio.sleep(0.005)
            ending = asyncio.ensure_future(client.server.drain())
            await asyncio.sleep(0)
            refused = await client.call("POST", "/v1/completions", LONG)
            ready = await client.call("GET", "/ready")
            await ending
            return await running, refused, ready

        running, refused, ready = client.run(drain())
        assert (running.status, refused.status, ready.status) == (200, 503, 503)
        assert running.json["usage"]["completion_tokens"] == NEW
        assert "retry-after" in refused.headers
        assert client.server.worker.phase == "stopped"


def test_draining_has_an_end(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters, drain_seconds=0.1) as client:
        calls = Calls(client, monkeypatch)
        calls.seconds = 0.2

        async def drain() -> Any:
            running = asyncio.ensure_future(client.call("POST", "/v1/completions", LONG))
            while not calls.count:
                await asyncio.sleep(0.005)
            await client.server.drain()
            return await running

        assert client.run(drain()).status == 503


def test_a_worker_that_fails_again_and_again_is_unhealthy(letters: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(letters) as client:
        calls = Calls(client, monkeypatch)
        calls.fails, calls.seconds = 3, 0.0
        for _ in range(3):
            assert client.post("/v1/completions", LONG).status == 500
        client.wait_until(lambda: client.server.worker.phase == "failed")
        assert (client.get("/health").status, client.get("/ready").status) == (503, 503)
        assert client.post("/v1/completions", LONG).status == 503
