"""Run cases within a time, each in a worker that may fail, and write rows as they come."""

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from .case import Case

Row = dict[str, Any]


class Worker:
    """A process that speaks as `worker.serve` does.

    Args:
        command: what to start.
        seconds: time it has to start up.
        env: its environment, this process's by default.

    Attributes:
        header: what it said of itself.

    Raises:
        RuntimeError: it does not start.
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
        """Whether it can be given another case."""
        return self._process.poll() is None

    def measure(self, case: Case, seconds: int | float) -> Row:
        """What it finds, or under "failed" why there is nothing: it said so, it died, or it took longer than `seconds`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
            self._process.stdin.flush()
        found = self._answer(seconds)
        if found.pop("lost", False):
            self.close()
        return found

    def close(self) -> None:
        """End it, and with it all that it holds on the device."""
        self._process.kill()
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
            return {"failed": f"took longer than {seconds:.0f} s", "timed_out": True, "lost": True}
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
    budget_seconds: int | float | None = None,
    case_seconds: int | float = 600,
    said: Callable[[Row], None] = lambda row: None,
    facts: Mapping[str, Any] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Row]:
    """Measure the cases that `out` does not have yet, and write a row for each as it comes.

    Args:
        workers: the command for each `Case.program`.
        out: the result file: JSON with a header and rows. One that is there must be of this device and these versions.
        budget_seconds: stop after so long; a case that this interrupts, and those after it, are left for another run.
        case_seconds: a case that takes longer is a row that says so.
        said: called with each new row.
        facts: what else the header of a new file says.
        env: for a `Case.program`, variables that its worker has on top of this process's.

    Returns:
        All rows of the file.

    Raises:
        ValueError: the file is of another device, or of other versions.
        RuntimeError: the first program's worker does not start. (Of others that do not, each case is a row that says so.)
    """
    end = time.monotonic() + (float("inf") if budget_seconds is None else budget_seconds)
    header, rows = _read(out)
    wanted = [json.loads(json.dumps(dataclasses.asdict(case))) for case in cases]
    there = [{name: row.get(name) for name in wanted[0]} for row in rows] if wanted else []
    worker, program, refusal = None, None, None
    try:
        for case, fields in zip(cases, wanted, strict=True):
            left = end - time.monotonic()
            if fields in there:
                continue
            if left <= 0:
                break
            if case.program != program or (worker is not None and not worker.alive):
                if worker is not None:
                    worker.close()
                worker, refusal, first = None, None, program is None
                program = case.program
                try:
                    apart = {**os.environ, **(env or {}).get(program, {})}
                    worker = Worker(workers[program], min(case_seconds, left), apart)
                    header = (
                        _same(out, header, {**worker.header, **(facts or {})})
                        if program == cases[0].program
                        else header
                    )
                except RuntimeError as error:
                    if first:
                        raise
                    refusal = str(error)
            left = end - time.monotonic()
            found = {"failed": refusal} if worker is None else worker.measure(case, min(case_seconds, left))
            if found.pop("timed_out", False) and left < case_seconds:
                break
            rows.append(fields | found)
            _write(out, header or {}, rows)
            said(rows[-1])
    finally:
        if worker is not None:
            worker.close()
    return rows


def _read(path: Path) -> tuple[Row | None, list[Row]]:
    if not path.exists():
        return None, []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["header"], found["rows"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is there, but is not a result file of kvjax; give another path") from None


def _same(path: Path, known: Row | None, now: Row) -> Row:
    """The header of the file, which this run must be able to go on with."""
    if known is None:
        return now
    for name in ("device", "versions", "settings"):
        if known.get(name) != now.get(name):
            raise ValueError(f"{path} has other {name} ({known.get(name)}; now {now.get(name)}); give another path")
    return known


def _write(path: Path, header: Row, rows: list[Row]) -> None:
    from kvjax.evals import report

    report.write(path, json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
