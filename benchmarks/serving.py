"""Measure a server with OpenAI's interface under load, with prompts of random token ids.

    python -m benchmarks.serving --url http://127.0.0.1:8000 --rate 8 --requests 400 --prompt 220 --answer 200 --vocabulary 128000

The load is open: requests arrive at random times (a Poisson process), or with `--even` at equal intervals, whether or not
earlier ones have been answered. They come from processes of their own, through `/v1/completions`, as streams. Answers have
the number of tokens that was asked for, as the end token is ignored; kvjax and vLLM have the field for it. `KVJAX_API_KEY`
has the key, if the server needs one.

Prints one JSON object, with the first error of each status other than 200. `--out` also adds it to a result file, in place of
one of the same `--program` and load. Times of several programs are comparable only on the same machine. Times are in seconds:
`ttft` from a request to its first event, `gap` between two events of a stream, `total` from a request to its end. With
`--shared`, `ttft_first` is that of the request that was sent first, which finds no stored prefix if the seed is new to the server.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PERCENTILES = 50, 90, 99


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        url: address of the server, without path.
        rate: requests per second; infinite to send all at once.
        requests: number of requests.
        prompt, answer: tokens of each prompt and answer.
        vocabulary: prompts have ids below this number.
        shared: first tokens that all prompts have in common.
        even: whether requests arrive at equal intervals.
        seed: of the prompts and of the times at which requests are sent.
        model: the model's name; None to ask the server for it.
        key: API key.
    """

    url: str
    rate: float
    requests: int
    prompt: int
    answer: int
    vocabulary: int
    shared: int = 0
    even: bool = False
    seed: int = 0
    model: str | None = None
    key: str = field(default="", repr=False)


@dataclass
class Answer:
    """One answer. `status` is that of HTTP; 0 if the connection failed, or the stream ended early. `error` is why."""

    status: int = 0
    error: str = ""
    tokens: int = 0
    sent: float = 0.0
    events: list[float] = field(default_factory=list)
    ended: float = 0.0


async def drive(load: Load, share: int = 0, shares: int = 1, start: float | None = None) -> list[Answer]:
    """Send one share of the requests at their times, and wait for all answers.

    Args:
        load: the load. All shares know all arrivals.
        share: index of this share.
        shares: number of shares.
        start: when the load begins, as `time.time`.
    """
    random = np.random.default_rng(load.seed)
    gaps = np.full(load.requests, 1 / load.rate)  # zeros where the rate is infinite
    if not load.even and np.isfinite(load.rate):
        gaps *= random.exponential(size=load.requests)
    times, begun = np.cumsum(gaps), time.time() if start is None else start
    shared = random.integers(0, load.vocabulary, load.shared).tolist()
    tasks: list[asyncio.Task[Answer]] = []
    for i in range(share, load.requests, shares):
        rest = np.random.default_rng((load.seed, i)).integers(0, load.vocabulary, load.prompt - load.shared).tolist()
        await asyncio.sleep(max(begun + float(times[i]) - time.time(), 0))
        tasks.append(asyncio.create_task(_ask(load, [*shared, *rest])))
    return list(await asyncio.gather(*tasks))


async def _ask(load: Load, prompt: Sequence[int]) -> Answer:
    body = {"model": load.model, "prompt": prompt, "max_tokens": load.answer, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(sent=time.perf_counter())
    try:
        async for data in events(load.url, load.key, json.dumps(body).encode()):
            answer.status = 200
            if data == b"[DONE]":
                answer.ended = time.perf_counter()
                return answer
            event = json.loads(data)
            if event.get("choices"):
                answer.events.append(time.perf_counter())
            elif event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    except RefusedError as error:
        answer.status, answer.error = error.status, error.text
    except (OSError, EOFError, ValueError) as error:
        answer.status, answer.error = 0, str(error)
    else:
        answer.status, answer.error = 0, "the stream ended early"
    return answer


class RefusedError(Exception):
    """A response that is no stream.

    Args:
        status: its HTTP status.
        text: its body.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


async def events(url: str, key: str, body: bytes, route: str = "/v1/completions") -> AsyncGenerator[bytes]:
    """Data of the events of a stream. A client of HTTP/1.1 that costs as little as possible.

    Raises:
        RefusedError: the server answered with another status than 200.
        OSError, EOFError: the connection failed.
    """
    place = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80, limit=1 << 22)
    try:
        lines = [
            f"POST {route} HTTP/1.1",
            f"Host: {place.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status, text = int(head.split(" ", 2)[1]), b""
        parts = _chunks(reader) if "transfer-encoding: chunked" in head else _rest(reader)
        if status != 200:
            raise RefusedError(status, b"".join([part async for part in parts]).decode())
        async for part in parts:
            *blocks, text = (text + part).split(b"\n\n")
            for block in blocks:
                if block.startswith(b"data: "):
                    yield block[6:]
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part


def summary(load: Load, answers: Sequence[Answer]) -> dict[str, Any]:
    """The measurements of all answers."""
    good = [answer for answer in answers if answer.status == 200]
    statuses = sorted({answer.status for answer in answers})
    row: dict[str, Any] = {name: value for name, value in asdict(load).items() if name != "key"}
    row["statuses"] = {str(status): sum(answer.status == status for answer in answers) for status in statuses}
    errors = {str(answer.status): answer.error for answer in reversed(answers) if answer.status != 200}
    row |= {"errors": errors} if errors else {}
    if not good:
        return row
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in good)
    row |= {"seconds": seconds, "tokens": sum(answer.tokens for answer in good)}
    row |= {"tokens_per_second": row["tokens"] / seconds, "requests_per_second": len(good) / seconds}
    measured = {
        "ttft": [answer.events[0] - answer.sent for answer in good if answer.events],
        "gap": [gap for answer in good for gap in np.diff(answer.events).tolist()],
        "total": [answer.ended - answer.sent for answer in good],
    }
    if load.shared:
        first = min(answers, key=lambda answer: answer.sent)
        row["ttft_first"] = first.events[0] - first.sent if first.status == 200 and first.events else None
    for name, values in measured.items():
        if values:
            found = np.percentile(values, PERCENTILES)
            row |= {f"{name}_p{at}": float(value) for at, value in zip(PERCENTILES, found, strict=True)}
    return row


def _share(load: Load, share: int, shares: int, start: float) -> list[Answer]:
    return asyncio.run(drive(load, share, shares, start))


def first_model(load: Load) -> str:
    """Name of the model that the server has."""
    request = urllib.request.Request(f"{load.url}/v1/models")
    if load.key:
        request.add_header("Authorization", f"Bearer {load.key}")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())["data"][0]["id"]


def add(path: Path, program: str, row: dict[str, Any]) -> None:
    """Add the measurements of a load to a result file, in place of earlier ones of the same program and load.

    Raises:
        SystemExit: the file was measured with other versions, or on another device.
    """
    import kvjax  # here, as the processes that send requests need no JAX
    from benchmarks import report

    versions = {"kvjax": kvjax.__version__, **{name: metadata.version(name) for name in ("jax", "numpy")}}
    versions = {"python": platform.python_version(), **versions}
    about = {"program": program, "versions": versions, **report.measured_here()}
    new = about | {name: value for name, value in row.items() if name not in ("url", "model")}
    header = {"date": new["date"], "device": _device(), "versions": versions, "settings": {}}
    same = ("program", "rate", "requests", "prompt", "answer", "shared", "even", "seed")
    header, before = report.begun(path, header)
    report.write(path, header, [*(old for old in before if any(old[name] != new[name] for name in same)), new])


def _device() -> str:
    """A GPU of this machine, which it does not use; its processor where there is none."""
    if shutil.which("nvidia-smi") is None:
        return f"1 x {platform.machine()} (cpu)"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return f"1 x {subprocess.check_output(command, text=True).splitlines()[0]} (gpu)"


def main() -> None:
    """Send the load and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second; inf sends all at once")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=220, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--shared", type=int, default=0, help="first tokens that all prompts have in common")
    parser.add_argument("--even", action="store_true", help="requests at equal intervals")
    parser.add_argument("--vocabulary", type=int, required=True, help="token ids are below this number")
    parser.add_argument("--model", help="by default the first of the server's")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--program", help="what serves, for the result file: its name, version and options")
    options = vars(parser.parse_args())
    processes, out, program = (options.pop(name) for name in ("processes", "out", "program"))
    if out is not None and program is None:
        parser.error("--out needs --program")
    load = Load(**options, key=os.environ.get("KVJAX_API_KEY", ""))
    if load.model is None:
        load = Load(**{**asdict(load), "model": first_model(load)})
    start = time.time() + 2  # when all processes have begun
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        shares = pool.starmap(_share, [(load, share, processes, start) for share in range(processes)])
    row = summary(load, [answer for answers in shares for answer in answers])
    print(json.dumps(row))
    if out is not None:
        add(out, program, row)


if __name__ == "__main__":
    main()
