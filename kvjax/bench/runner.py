"""Runs cases within a time limit, on one device or several, in worker processes that may fail."""

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from .case import Case
from .results import Results, Row


class Worker:
    """A worker process, which runs `worker.serve`.

    Args:
        command: command that starts the process.
        seconds: time limit for the start.
        env: environment of the process; by default that of this process.

    Attributes:
        header: what the worker reports about itself.

    Raises:
        RuntimeError: the worker does not start.
    """

    def __init__(self, command: Sequence[str], seconds: int | float, env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (the process writes it for as long as it lives)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=env)
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        answer = self._answer(seconds)
        if "failed" in answer:
            self.close()
            raise RuntimeError(f"{' '.join(command[:3])}: {answer['failed']}")
        self.header = answer

    @property
    def alive(self) -> bool:
        """Whether the worker can measure another case."""
        return self._process.poll() is None

    def measure(self, case: Case, seconds: int | float) -> Row:
        """Measure a case. If it fails, crashes or exceeds `seconds`, the row has only the reason, under "failed"."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
            self._process.stdin.flush()
        found = self._answer(seconds)
        if found.pop("lost", False):
            self.close()
        return found

    def kill(self) -> None:
        """Kill the process from another thread. A thread that waits for its answer gets a failure."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, which frees its device memory."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: int | float) -> Row:
        try:
            line = self._lines.get(timeout=max(seconds, 0.1))
        except Empty:
            return {"failed": f"took longer than {seconds:.0f} s", "lost": True}
        if line:
            return json.loads(line)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return {"failed": f"the process ended with code {self._process.wait()}: {said[-2000:]}", "lost": True}


def run(
    cases: Sequence[Case],
    workers: Mapping[str, Sequence[str]],
    out: Path,
    *,
    devices: int = 1,
    budget_seconds: int | float | None = None,
    case_seconds: int | float = 600,
    said: Callable[[Row], None] = lambda row: None,
    facts: Mapping[str, Any] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Row]:
    """Measure the cases that `out` does not contain yet, and write each row as it comes.

    Args:
        cases: cases in the order of their rows. Rows of other cases in `out` come first.
        workers: command of the worker for each `Case.program`.
        out: result file: JSON with a header and rows. An existing file has to be of this device and these versions.
        devices: number of CUDA devices that share the cases of the first program, with one worker each. Other programs,
            which load on the host may slow down, follow on the first device, one case at a time.
        budget_seconds: time limit of the run. Interrupted and later cases are left for another run.
        case_seconds: time limit of a case. A case that exceeds it becomes a failed row.
        said: called with each new row.
        facts: additional header fields of a new file.
        env: additional environment variables of the worker for each `Case.program`.

    Returns:
        All rows of the file.

    Raises:
        ValueError: the file has another device or other versions, devices differ, or there are too few.
        RuntimeError: the first program's worker does not start. If another program's worker does not start, its cases
            become failed rows.
    """
    places = environments(devices)
    several = {"devices": devices} if devices > 1 else {}
    results, clock = Results(out, cases, {**(facts or {}), **several}, said), _Clock(budget_seconds, case_seconds)

    def start(program: str, place: Mapping[str, str]) -> Worker:
        return Worker(workers[program], clock.for_next, {**os.environ, **(env or {}).get(program, {}), **place})

    missing = sorted(results.missing(), key=lambda case: case.program != cases[0].program)
    for program, group in groupby(missing, lambda case: case.program):
        waiting, first = deque(group), program == cases[0].program
        sharing = places[: len(waiting)] if first else places[:1]
        lanes = [_Lane(partial(start, program, place), first, results, clock) for place in sharing]
        _side_by_side(lanes, waiting, results, clock)
    return results.rows


def environments(devices: int) -> list[dict[str, str]]:
    """Environment variables that make each of `devices` CUDA devices the only one that a process sees; none for one device.

    Raises:
        ValueError: `devices` is less than 1, or more than this process sees.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices; give 1 or more")
    if devices == 1:
        return [{}]
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(devices)] if known is None else known.split(",")
    if len(names) < devices:
        raise ValueError(f"{devices} devices, but CUDA_VISIBLE_DEVICES is {known!r}")
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:devices]]


class _Clock:
    """Time limits of a run and of its cases."""

    def __init__(self, budget_seconds: int | float | None, case_seconds: int | float) -> None:
        self._end = float("inf") if budget_seconds is None else time.monotonic() + budget_seconds
        self._case_seconds = case_seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def for_next(self) -> int | float:
        return min(self._case_seconds, self._end - time.monotonic())

    def stop(self) -> None:
        self._end = 0


class _Lane:
    """Measures cases one after another, in a worker that is started on first use and restarted after a crash.

    Args:
        start: starts a worker.
        first: whether it belongs to the run's first program, which provides the header and has to start.
        results: the result file.
        clock: the time limits.
    """

    def __init__(self, start: Callable[[], Worker], first: bool, results: Results, clock: _Clock) -> None:
        self._start, self._first, self._results, self._clock = start, first, results, clock
        self._worker: Worker | None = None

    def work(self, waiting: deque[Case]) -> str | None:
        """Measure waiting cases until none is left, time is over, or no worker starts. In the last case, return the reason."""
        try:
            while waiting and not self._clock.over:
                try:
                    worker = self._ready()
                except RuntimeError as error:
                    if self._first and self._worker is None:
                        raise
                    return str(error)
                case = _taken(waiting)
                if case is None:
                    break
                found = worker.measure(case, self._clock.for_next)
                if "failed" in found and self._clock.over:
                    break  # interrupted by the end of the run
                self._results.add(case, found)
        finally:
            if self._worker is not None:
                self._worker.close()
        return None

    def kill(self) -> None:
        """Kill the current measurement, from another thread."""
        if self._worker is not None:
            self._worker.kill()

    def _ready(self) -> Worker:
        if self._worker is not None:
            if self._worker.alive:
                return self._worker
            self._worker.close()
        self._worker = self._start()
        if self._first:
            self._results.begin(self._worker.header)
        return self._worker


def _taken(waiting: deque[Case]) -> Case | None:
    with contextlib.suppress(IndexError):  # another lane took the last case
        return waiting.popleft()


def _side_by_side(lanes: Sequence[_Lane], waiting: deque[Case], results: Results, clock: _Clock) -> None:
    """Let lanes share the waiting cases. Cases that remain without a worker become failed rows."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        working = [pool.submit(lane.work, waiting) for lane in lanes]
        try:
            refusals = [refusal for done in as_completed(working) if (refusal := done.result())]
        except BaseException:  # including an interrupt
            clock.stop()
            for lane in lanes:
                lane.kill()
            raise
    for case in () if clock.over else waiting:
        results.add(case, {"failed": refusals[0]})
