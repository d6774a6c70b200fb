"""Measure prefill and decoding of an older and a newer version of kvjax, case by case on one device.

    git archive --prefix=older/ COMMIT | tar x -C /tmp
    python -m benchmarks.beside /tmp/older --context 16384,65536 --jobs 12 --out benchmarks/results/beside-h200.json
    python -m benchmarks.beside /tmp/older --cases cases.jsonl --out FILE

The newer version is the one that this file is part of. `--cases` is a file of JSON lines. Each line has the fields of
`kvjax.bench.case.Case`, with the policy as on the command line: `{"policy": "treekv:0.2", "context": 16384, "batch": 8, "shape":
"llama-3.1-8b", "weights": "int8"}`. Without it, the cases are all combinations of `--policies`, `--context` and `--batch`.

Each case of each version has its own process. `--jobs` processes compile at a time. When all programs are compiled, the processes measure one
after the other: each case first with one version, then with the other. XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" gives both
versions the same matmuls. An interrupted run continues if it is started again with the same file. Compare compile times only with `--jobs 1`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

POLICIES = "full,treekv:0.2,chunkkv:0.2,chelsea:0.2,catekv:share_adaptive=0.4,clusterkv:1024,quest:1024"
VERSIONS = "older", "newer"
TIMES = "ttft_s", "tpot_ms", "compile_s"
BYTES = "cache_bytes", "peak_bytes", "cache_bytes_read"

SIZES = "policy", "context", "batch"
"""Fields of a case that the table always shows."""

OTHERS = "shape", "new_tokens", "prefill", "dtype", "layers", "weights"
"""Fields that the table shows where cases differ in them."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="folder with the older version's source tree")
    parser.add_argument("--cases", type=Path, help="file of cases, in place of the options from --shape to --layers")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--context", default="16384", help="tokens of the prompt; several separated by commas")
    parser.add_argument("--batch", default="1", help="sequences; several separated by commas")
    parser.add_argument("--policies", default=POLICIES, help="as both versions read them")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--after", type=Path, help="wait until this file exists, then measure")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/beside.json"))
    args = parser.parse_args()
    if not (args.older / "kvjax" / "bench").is_dir():
        parser.error(f"{args.older} is no tree of kvjax: it has no kvjax/bench")

    from tqdm import tqdm

    from benchmarks import report

    trees = dict(zip(VERSIONS, (args.older.resolve(), Path(__file__).resolve().parents[1]), strict=True))
    header, rows = report.begun(args.out, report.header(weights="random", xla_flags=os.environ.get("XLA_FLAGS", "")))
    missing = [
        (version, case)
        for case in cases(args)
        for version in VERSIONS
        if not any(row["version"] == version and case.items() <= row.items() for row in rows)
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        made = pool.map(lambda each: Measuring(trees[each[0]], each[1]), missing)
        waiting = list(tqdm(made, total=len(missing), unit="case", desc="compiled"))
    while args.after is not None and not args.after.exists():
        time.sleep(0.2)
    for (version, case), each in zip(tqdm(missing, unit="case", desc="measured"), waiting, strict=True):
        found = each.measured()
        if isinstance(found, str):
            tqdm.write(f"{version} {case}: {found}")
            continue
        rows.append({"version": version, **case, **found})
        report.write(args.out, header, rows)
    print(table(rows))


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured: the fields of each `kvjax.bench.case.Case`, with the policy as text."""
    if args.cases is not None:
        return [json.loads(line) for line in args.cases.read_text(encoding="utf-8").splitlines() if line.strip()]
    from kvjax.policies.text import split_policies

    shared = {"shape": args.shape, "new_tokens": args.new_tokens, "prefill": not args.skip_prefill}
    return [
        {"policy": policy, "context": int(context), "batch": int(batch), **shared, "layers": args.layers}
        for context in args.context.split(",")
        for batch in args.batch.split(",")
        for policy in split_policies(args.policies)
    ]


class Measuring:
    """A process with one version of kvjax that has compiled a case and waits to measure it.

    Args:
        tree: folder of the version.
        asked: the case, as `cases` returns it.
    """

    def __init__(self, tree: Path, asked: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 read after the process has ended
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            cwd=tree,
        )
        assert self._process.stdout is not None
        self._compiled = self._process.stdout.readline()

    def measured(self) -> dict[str, Any] | str:
        """The figures of a row, or an error message."""
        found, _ = self._process.communicate("measure\n" if self._compiled else None)
        if self._process.returncode:
            self._errors.seek(0)
            return (self._errors.read().strip().splitlines() or ["no error message"])[-1][:300]
        return json.loads(found.splitlines()[-1])


def worker(asked: dict[str, Any]) -> None:
    """The process of one case: compile, print a line, wait for a line, measure, print the figures."""
    import importlib

    import jax

    from kvjax.bench import case as cases
    from kvjax.bench import floor
    from kvjax.models import init

    try:
        measuring: Any = importlib.import_module("kvjax.bench.measure")
    except ModuleNotFoundError:  # its older name
        measuring = importlib.import_module("kvjax.bench.measuring")
    policy, settings = cases.read_policy(asked.pop("policy"))
    case = cases.Case(policy, settings, **asked)
    seconds = measuring.compile_only(case)
    measuring._forget = lambda: None  # keep the compiled programs, which are measured next
    print("compiled", flush=True)
    if not sys.stdin.readline():
        return
    params = init(case.config, jax.random.key(0), case.dtype, case.weights, case.weights)
    row = measuring.measure(case, jax.block_until_ready(params), floor.bandwidth(jax.devices()[0].device_kind), None)
    print(json.dumps(row | seconds))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times and bytes of both versions and the changes between them, one line per case."""
    from benchmarks import report

    differing = [name for name in OTHERS if len({row.get(name) for row in rows}) > 1]
    found = {(row["version"], *(row.get(name) for name in (*SIZES, *differing))): row for row in rows}
    lines = []
    for version, policy, context, batch, *others in found:
        older, newer = (found.get((each, policy, context, batch, *others)) for each in VERSIONS)
        if version == VERSIONS[0] and older is not None and newer is not None:
            about = (f"{name}={value}" for name, value in zip(differing, others, strict=True) if value is not None)
            case = ", ".join([f"{context} x {batch}", *about])
            figures = (_compared(older.get(name), newer.get(name)) for name in (*TIMES, *BYTES))
            lines.append([f"`{policy}`", case, *figures])
    return report.table(["policy", "case", *TIMES, *BYTES], lines, "llr")


def _compared(older: float | None, newer: float | None) -> str:
    if older is None or newer is None:
        return ""
    if older == newer:
        return f"{newer:g}, equal"
    return f"{older:.4g} to {newer:.4g} ({100 * (newer / older - 1):+.1f} %)"


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))
    else:
        main()
