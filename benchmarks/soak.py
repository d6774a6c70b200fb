"""Keep a server of a tiny model under load, with clients that misbehave, and check what it promises.

    python -m benchmarks.soak --seconds 90

32 clients send requests whose answers are known from an idle server. Some ask for JSON that follows a schema, if llguidance
is installed. Some close the connection early, some send malformed requests, and some read slowly. Now and then many are
sent at once. In the middle the server gets SIGTERM. It has to end well, and starts again. Prints one JSON object, and exits
with 1 if a check fails:

- Every answer equals that of the idle server: tokens, and log-probabilities bit for bit.
- Every request ends with an answer, a refusal that names the reason, or a closed connection during the restart.
- Nothing is compiled once the server is ready.
- Memory of the server's process after a warm-up grows by less than 1 % or 16 MB.
- `/health` answers within 100 ms, for 99 % of the calls (`--health`).
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import RefusedError, events

CLIENTS = 32
VOCABULARY, TOTAL, NEW = 258, 192, 32
BURST = 160
"""Requests that are sent at once: ten times the queue."""

MALFORMED = b"{", b"[]", b'{"prompt": [99999]}', b'{"prompt": [1], "beams": 2}', b'{"prompt": 1}', b"\xff" * 999
OPTIONS = {
    "--policy": "treekv:32",
    "--rows": 4,
    "--max-total-tokens": TOTAL,
    "--max-new-tokens": NEW,
    "--prefill-block": 32,
    "--prefix-host-bytes": "200kB",
    "--max-queue": 16,
    "--name": "soak",
    "--steps": 4,
}
"""Options of the server."""


def save_model(path: Path) -> None:
    """A random model, whose tokens are bytes."""
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    import kvjax
    from kvjax.config import ModelConfig, RopeConfig
    from kvjax.conversion import Tokenizer
    from kvjax.models import init

    texts = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(texts[:2])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(backend, eos=(1,), chat_template=template)

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
    }
    rope = RopeConfig(theta=10000.0, dim=16)
    config = ModelConfig.uniform("llama", **sizes, num_kv_heads=2, head_dim=16, max_position=512, rope=rope, eos=(1,))
    params = dataclasses.replace(init(config, jax.random.key(0)), tokenizer=tokenizer)
    kvjax.save(params, path, format="safetensors")


def bodies() -> list[dict[str, Any]]:
    """Requests. Half of them have one of eight beginnings, so that the server's store of states is full."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, VOCABULARY, (8, 70)).tolist()
    found: list[dict[str, Any]] = []
    for i in range(24):
        prompt = (shared[i // 2 % 8] if i % 2 else []) + draw.integers(
            0, VOCABULARY, int(draw.integers(1, 60))
        ).tolist()
        sampled = {"temperature": 0.8 * (i % 3), "seed": i, "max_tokens": int(draw.integers(1, NEW + 1))}
        tops = 5 if i % 4 == 0 else 0
        found.append(
            {
                "prompt": prompt,
                **sampled,
                "ignore_eos": True,
                "logprobs": tops,
                "return_token_ids": True,
                "stream": True,
            }
        )
    return found + (forms() if importlib.util.find_spec("llguidance") else [])


def forms() -> list[dict[str, Any]]:
    """Requests for JSON that follows a schema."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 9}
    schema = {"type": "object", "properties": {"n": numbers}, "required": ["n"], "additionalProperties": False}
    return [
        {
            "messages": [{"role": "user", "content": "numbers " * (i + 1)}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
            "temperature": 0.8,
            "seed": i,
            "max_tokens": NEW,
            "logprobs": True,
            "return_token_ids": True,
            "stream": True,
        }
        for i in range(4)
    ]


class Server:
    """The server's process."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = [str(each) for option in (OPTIONS | {"--port": self.port}).items() for each in option]
        self._command = [sys.executable, "-m", "kvjax", "serve", str(model), *options]

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)
        while self.get("/ready") is None:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}")
            time.sleep(0.2)

    def get(self, path: str) -> str | None:
        """What a route answers; None if it is not 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.read().decode()
        except (urllib.error.URLError, OSError):
            return None

    def value(self, name: str) -> float:
        """A metric."""
        lines = (self.get("/metrics") or "").splitlines()
        return float(next(line for line in lines if line.startswith(f"kvjax:{name}{{")).split()[-1])

    def memory(self) -> int:
        """Bytes of the process's memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


async def ask(url: str, body: bytes, *, leave_after: int | None = None, pause: float = 0.0) -> tuple[Any, ...] | None:
    """Token ids and log-probabilities of an answer; None if the client has left before its end."""
    ids, logprobs, count = [], [], 0
    route = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
    async with contextlib.aclosing(events(url, "", body, route)) as stream:
        async for data in stream:
            if data == b"[DONE]":
                return tuple(ids), tuple(logprobs)
            (choice,) = json.loads(data)["choices"]
            ids += choice.get("token_ids", [])
            found = choice["logprobs"] or {}
            logprobs += found.get("token_logprobs", []) + [each["logprob"] for each in found.get("content", [])]
            count += 1
            if leave_after is not None and count > leave_after:
                return None
            await asyncio.sleep(pause)
    raise EOFError("a stream without an end")


class Clients:
    """Clients, and what has come of their requests."""

    def __init__(self, url: str, expected: list[Any], pause: float) -> None:
        self._url, self._expected, self._pause = url, expected, pause
        self._bodies = [json.dumps(body).encode() for body in bodies()]
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.closing = False

    async def one(self, draw: random.Random) -> None:
        """Send one request of a random kind."""
        kind, i = draw.random(), draw.randrange(len(self._bodies))
        try:
            if kind < 0.01:
                await ask(self._url, draw.choice(MALFORMED))
                self.wrong.append("a malformed request was answered")
            elif kind < 0.06:
                left = await ask(self._url, self._bodies[i], leave_after=draw.randrange(3))
                self.counts["left" if left is None else "answered"] += 1
            else:
                found = await ask(self._url, self._bodies[i], pause=0.2 if kind > 0.97 else 0.0)
                self.counts["answered"] += 1
                if b'"response_format"' in self._bodies[i]:  # these are among the answered ones
                    self.counts["answered with JSON"] += 1
                if found != self._expected[i]:
                    self.wrong.append(f"answer {i} differs from that of the idle server")
        except RefusedError as error:
            name = "malformed" if kind < 0.01 and 400 <= error.status < 500 else f"refused {error.status}"
            self.counts[name] += 1
            if name not in ("malformed", "refused 503"):
                self.wrong.append(f"a request was refused: {error}")
        except (OSError, EOFError, KeyError, ValueError) as error:
            self.counts["connection closed"] += 1
            if not self.closing:
                self.wrong.append(f"a connection failed: {error!r}")

    async def run(self, seconds: float, seed: int) -> None:
        """Send requests for a time, with a burst in the middle of it."""
        end = time.monotonic() + seconds

        async def loop(number: int) -> None:
            draw = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                await self.one(draw)
                await asyncio.sleep(draw.random() * self._pause)

        async def burst() -> None:
            await asyncio.sleep(seconds / 2)
            await asyncio.gather(*(self.one(random.Random(-i)) for i in range(BURST)))

        await asyncio.gather(burst(), *(loop(number) for number in range(CLIENTS)))


def probe(url: str, seconds: float) -> list[float]:
    """Seconds that calls of `/health` take, from a process that does nothing else."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            response.read()
        found.append(time.perf_counter() - begun)
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    """A started server, which is killed if an error leaves it running."""
    server.start()
    try:
        yield
    finally:
        if server.process.poll() is None:
            server.process.kill()


def main() -> None:
    """Run the soak and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument(
        "--pause", type=float, default=0.05, metavar="SECONDS", help="maximum time that a client waits between requests"
    )
    parser.add_argument(
        "--health", type=float, default=0.1, metavar="SECONDS", help="time that 99 %% of the calls of /health may take"
    )
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    seconds = args.seconds / 3
    row: dict[str, Any] = {"seconds": args.seconds}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        server = Server(Path(folder) / "model")
        with running(server), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as prober:
            prober.submit(os.getpid).result()  # it begins, before the clients give way to it and to the server
            os.nice(10)
            compiled = server.value("compilations_total")
            expected = [asyncio.run(ask(server.url, json.dumps(body).encode())) for body in bodies()]
            clients = Clients(server.url, expected, args.pause)
            asyncio.run(clients.run(seconds, 1))
            row["memory_warm"] = server.memory()
            probed = prober.submit(probe, server.url, seconds)
            asyncio.run(clients.run(seconds, 2))
            health = probed.result()
            row["memory_end"] = server.memory()
            names = "prefix_states_on_device", "prefix_host_bytes", "prefix_states_restored_total"
            row |= {name: server.value(name) for name in names}
            row["compiled"] = server.value("compilations_total") - compiled

            async def ending() -> None:
                task = asyncio.create_task(clients.run(2.0, 3))
                await asyncio.sleep(0.5)
                clients.closing = True
                server.process.send_signal(signal.SIGTERM)
                await task

            asyncio.run(ending())
            row["exit_code"] = server.process.wait(60)
        clients.closing = False
        with running(server):
            asyncio.run(clients.run(max(seconds - 10, 5), 4))
            row["running_at_end"] = server.value("num_requests_running")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(60)
    kinds = ["answered", *(["answered with JSON"] if importlib.util.find_spec("llguidance") else [])]
    row |= {
        "requests": dict(clients.counts),
        "wrong": clients.wrong[:10],
        "health_p99": float(np.percentile(health, 99)),
        "health_calls": len(health),
        "load_average": os.getloadavg(),
    }
    row["checks"] = {
        "answers and refusals": not clients.wrong and min(clients.counts[name] for name in kinds) > 0,
        "compilations": row["compiled"] == 0,
        "memory": row["memory_end"] - row["memory_warm"] < max(0.01 * row["memory_warm"], 16e6),
        "health": row["health_p99"] <= args.health,
        "ends well": row["exit_code"] == 0 and row["running_at_end"] == 0,
    }
    print(json.dumps(row, indent=1))
    if args.out is not None:
        from benchmarks import report

        report.write(args.out, report.header(clients=CLIENTS, burst=BURST, pause=args.pause, **OPTIONS), [row])
    sys.exit(not all(row["checks"].values()))


if __name__ == "__main__":
    main()
