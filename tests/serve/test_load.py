"""The load generator, against a server on a socket."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from serve_client import NEW, Client

from benchmarks import report
from benchmarks.serving import Load, add, drive, summary


def test_load_through_a_socket(client: Client) -> None:
    """All requests are answered, at their times, and what is refused is counted."""
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
    options: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}",
        "rate": 200.0,
        "requests": 12,
        "prompt": 20,
        "answer": NEW,
    }
    load = Load(**options, vocabulary=62, shared=8, model="tiny")

    async def run() -> tuple[list[Any], list[float], list[Any]]:
        server = uvicorn.Server(uvicorn.Config(client.app, lifespan="off", log_level="warning"))
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.ensure_future(server.serve(sockets=[place]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            halves = await asyncio.gather(drive(load, 0, 2), drive(load, 1, 2))
            begun = time.perf_counter()
            even = await drive(Load(**options | {"rate": 20.0, "requests": 4}, vocabulary=62, model="tiny", even=True))
            bad = await drive(Load(**options | {"rate": float("inf"), "requests": 2}, vocabulary=62, model="other"))
        finally:
            server.should_exit = True
            await serving
        return [answer for half in halves for answer in half], [answer.sent - begun for answer in even], bad

    answers, sent, bad = client.run(run())
    assert [answer.status for answer in answers] == [200] * 12
    assert {answer.tokens for answer in answers} == {NEW}
    # None is early, by more than clocks differ. How late they are depends on what else the machine does.
    assert all(at > 0.05 * n - 0.005 for n, at in enumerate(sent, 1))
    row = summary(load, answers + bad)
    assert row["statuses"] == {"200": 12, "404": 2}
    assert "'other' is not served here" in row["errors"]["404"]
    assert list(row["errors"]) == ["404"]
    assert row["tokens"] == 12 * NEW
    assert 0 < row["ttft_p50"] <= row["ttft_p99"] <= row["total_p99"]
    assert row["ttft_first"] == answers[0].events[0] - answers[0].sent
    assert row["tokens_per_second"] > 0
    assert "key" not in row


def test_result_file_has_the_latest_of_each_program_and_load(tmp_path: Path) -> None:
    path, load = tmp_path / "serving.json", {"url": "u", "model": "m", "rate": 2.0, "requests": 3, "prompt": 4}
    load |= {"answer": 5, "shared": 0, "even": False}
    runs = (("a", 9.0, 2.0, 0), ("b", 8.0, 2.0, 0), ("a", 7.0, 3.0, 0), ("a", 5.0, 2.0, 1), ("a", 6.0, 2.0, 0))
    for program, seconds, rate, seed in runs:
        add(path, program, load | {"seconds": seconds, "rate": rate, "seed": seed})
    rows = report.read(path)["rows"]
    assert [tuple(row[name] for name in ("program", "seconds", "rate", "seed")) for row in rows] == list(runs[1:])
    assert all(row["date"] and "url" not in row and "model" not in row for row in rows)
