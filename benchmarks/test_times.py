"""Measure where the tests' time and memory go. Not a test: a command, and the pytest plugin that it loads.

    python -m benchmarks.test_times                          # the default tests
    python -m benchmarks.test_times --out FILE -- -m slow    # what follows -- goes to pytest

The command runs pytest and samples the memory of its processes. The plugin (`Plugin`) times tests in every process that
runs them, and writes JSON lines to a temporary folder. The command sums them by file and by test.

A test's seconds are divided into tracing, lowering, XLA's compilation, reading compiled programs from a cache, and the
rest, which is execution and Python code. JAX reports the first four. Memory is the proportional set size (PSS) of each
process of the run, sampled every second (Linux only). docs/testing.md describes the columns.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "KVJAX_TEST_TIMES"
"""Environment variable: folder that the processes write measurements to. If it is not set, the plugin does nothing."""

PHASES = {
    "/jax/compilation_cache/cache_retrieval_time_sec": "cached",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/jaxpr_trace_duration": "trace",
}
"""Phases by JAX event. Order matters: where spans overlap, time goes to the phase listed first."""


class Clock:
    """Collects the phases of the test that runs, and writes one JSON line per test."""

    def __init__(self, folder: Path) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.since = time.perf_counter()
        self.file = (folder / f"{os.getpid()}.jsonl").open("w", encoding="utf-8")

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Record an event. JAX reports it when its span ends."""
        if event in PHASES:
            end = time.perf_counter()
            # Tests that replace clocks make some durations longer than the test.
            self.spans.append((PHASES[event], max(end - duration_secs, self.since), end))

    def write(self, **row: Any) -> None:
        """Write one JSON line: `row`, with the phases since the previous line."""
        compiled = sum(phase == "compile" for phase, _, _ in self.spans)
        self.file.write(json.dumps({**row, "programs": compiled, **exclusive(self.spans)}) + "\n")
        self.file.flush()
        self.spans.clear()
        self.since = time.perf_counter()


def exclusive(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of each phase. Overlapping spans count once, as the phase that is first in `PHASES`."""
    order = list(PHASES.values())
    edges = sorted(
        (at, change, order.index(phase)) for phase, *ends in spans for at, change in zip(ends, (1, -1), strict=True)
    )
    depth, seconds, last = [0] * len(order), [0.0] * len(order), 0.0
    for at, change, phase in edges:
        if (inner := next((i for i, n in enumerate(depth) if n), None)) is not None:
            seconds[inner] += at - last
        depth[phase] += change
        last = at
    return dict(zip(order, seconds, strict=True))


class Plugin:
    """Pytest plugin that times the tests of one process."""

    def __init__(self, folder: Path) -> None:
        import jax

        self.clock = Clock(folder)
        jax.monitoring.register_event_duration_secs_listener(self.clock.listen)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        """Time the imports, which is everything since the process started, and the collection."""
        import psutil

        start = time.time()
        self.clock.write(test="imports", seconds=start - psutil.Process().create_time(), cpu=cpu())
        before = cpu()
        result = yield
        self.clock.write(test="collection", seconds=time.time() - start, cpu=cpu() - before)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Time a test, with its fixtures."""
        start, before = time.perf_counter(), cpu()
        result = yield
        self.clock.write(test=item.nodeid, seconds=time.perf_counter() - start, cpu=cpu() - before)
        return result


def cpu() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in processes that run tests, but not in the one that distributes them. Needs pytest-xdist."""
    if (folder := os.environ.get(FOLDER)) and (hasattr(config, "workerinput") or not config.option.numprocesses):
        config.pluginmanager.register(Plugin(Path(folder)))


def main() -> None:
    """Run pytest, sample its processes' memory, and write one result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/test-times.json")
    parser.add_argument(
        "--slowest", type=int, default=60, help="number of slowest tests to list (default: %(default)s)"
    )
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start, before = time.perf_counter(), cpu()
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.test_times", *args.pytest]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, FOLDER: folder})
        memory = Memory(process.pid)
        code = process.wait()
        wall, used = time.perf_counter() - start, cpu() - before
        files = sorted(Path(folder).glob("*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    peaks = memory.stop()
    # `each`: peaks of the largest processes, as many as ran tests. The coordinating process may be among them.
    summary = {
        "command": " ".join(["python", *command[1:]]),
        "exit_code": code,
        "seconds": round(wall, 1),
        "cpu_seconds": round(used, 1),
        "processes": len(files),
        "peak_gb": {"together": peaks.pop("together"), "each": sorted(peaks.values(), reverse=True)[: len(files)]},
    }
    from benchmarks import report

    tests = [line for line in lines if _is_test(line)]
    out = args.out or ROOT / "benchmarks/results/test-times.json"
    header = {**report.header(cores=os.cpu_count(), machine=platform.machine()), "run": summary}
    rows = [
        {"what": "all", **total(lines)},
        *({"what": name, **total([x for x in lines if x["test"] == name])} for name in ("imports", "collection")),
        *by_file(tests),
        *({"what": x["test"], **total([x])} for x in sorted(tests, key=lambda x: -x["cpu"])[: args.slowest]),
    ]
    report.write(out, header, rows)
    print(json.dumps(summary, indent=1))
    print(table(rows[:33]))
    sys.exit(code)


def total(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum over lines. `tests` is the number of tests, and `rest` the seconds outside JAX's phases."""
    names = "seconds", "cpu", *PHASES.values()
    sums = {name: sum(x[name] for x in lines) for name in names}
    sums["rest"] = sums["seconds"] - sum(sums[phase] for phase in PHASES.values())
    counts = {"tests": sum(map(_is_test, lines)), "programs": sum(x["programs"] for x in lines)}
    return counts | {k: round(v, 2) for k, v in sums.items()}


def _is_test(line: dict[str, Any]) -> bool:
    """Return whether a line is a test. The lines "imports" and "collection" are not."""
    return "::" in line["test"]


def by_file(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per file, sorted by processor time, largest first."""
    files: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for test in tests:
        files[test["test"].partition("::")[0]].append(test)
    return sorted(({"what": name, **total(lines)} for name, lines in files.items()), key=lambda row: -row["cpu"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)


class Memory(threading.Thread):
    """Samples the proportional set size of a process and its descendants every second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peaks, self.ended = pid, {"together": 0.0}, threading.Event()
        self.start()

    def run(self) -> None:
        """Sample until `stop` is called."""
        import psutil

        while not self.ended.wait(1.0):
            together = 0.0
            try:
                processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    held = process.memory_full_info().pss / 1e9
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                together += held
                self.peaks[str(process.pid)] = max(self.peaks.get(str(process.pid), 0.0), held)
            self.peaks["together"] = max(self.peaks["together"], together)

    def stop(self) -> dict[str, float]:
        """Return the peaks in GB, by process id, and of all processes together."""
        self.ended.set()
        self.join()
        return {name: round(peak, 2) for name, peak in self.peaks.items()}


if __name__ == "__main__":
    main()
