"""Prefill and decoding of an older version of kvjax beside this one's, case by case on one device.

    git archive --prefix=older/ COMMIT | tar x -C /tmp
    python -m benchmarks.beside /tmp/older --context 16384,65536 --jobs 12 --out benchmarks/results/beside-h200.json

Each case of each version is a process of its own. So many of `--jobs` compile beside each other; when all have, they measure one after
the other, older and newer version of a case in turn, with nothing beside them. XLA_FLAGS="--xla_gpu_autotune_level=0
--xla_gpu_enable_triton_gemm=false" gives both versions the same matrix products. A run that is cut short goes on where it was, if it is
started again with the same file. Compile times are told, too: those of `--jobs 1` are worth comparing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

POLICIES = "full,treekv:0.2,chunkkv:0.2,chelsea:0.2,catekv:share_adaptive=0.4,clusterkv:1024,quest:1024"
VERSIONS: tuple[str, ...] = "older", "newer"
TIMES = "ttft_s", "tpot_ms", "compile_s"
BYTES = "cache_bytes", "peak_bytes", "cache_bytes_read"

Wanted = tuple[str, str, int, int]
"""Version, policy, context, batch."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="folder of the older version's tree")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--context", default="16384")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--policies", default=POLICIES, help="as both versions read them")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at a time")
    parser.add_argument(
        "--after", type=Path, help="measure only when this file is there, which says that the device is free"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/beside.json"))
    args = parser.parse_args()
    if not (args.older / "kvjax" / "bench").is_dir():
        parser.error(f"{args.older} is no tree of kvjax: it has no kvjax/bench")

    from tqdm import tqdm

    from benchmarks import report
    from kvjax.policies.text import split_policies

    trees = dict(zip(VERSIONS, (args.older.resolve(), Path(__file__).resolve().parents[1]), strict=True))
    settings = {
        "weights": "random",
        "shape": args.shape,
        "prefill": not args.skip_prefill,
        "new_tokens": args.new_tokens,
        "layers": args.layers,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    header, rows = report.begun(args.out, report.header(**settings))
    there = [(row["version"], row["policy"], row["context"], row["batch"]) for row in rows]
    wanted: list[Wanted] = [
        (version, policy, int(context), args.batch)
        for context in args.context.split(",")
        for policy in split_policies(args.policies)
        for version in VERSIONS
    ]
    missing = [case for case in wanted if case not in there]
    shared = {
        "shape": args.shape,
        "new_tokens": args.new_tokens,
        "prefill": not args.skip_prefill,
        "layers": args.layers,
    }

    def begun(case: Wanted) -> "Measuring":
        version, policy, context, batch = case
        return Measuring(trees[version], {"policy": policy, "context": context, "batch": batch, **shared})

    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = list(tqdm(pool.map(begun, missing), total=len(missing), unit="case", desc="compiled"))
    while args.after is not None and not args.after.exists():
        time.sleep(0.2)
    for (version, *case), each in zip(tqdm(missing, unit="case", desc="measured"), waiting, strict=True):
        found = each.measured()
        if isinstance(found, str):
            tqdm.write(f"{version} {case}: {found}")
            continue
        rows.append({"version": version, **each.asked, **found})
        report.write(args.out, header, rows)
    print(table(rows))


class Measuring:
    """A process with one version's kvjax, which has compiled a case and waits to measure it.

    Args:
        tree: the version's folder.
        asked: the fields of its `kvjax.bench.case.Case`, with the policy as text.
    """

    def __init__(self, tree: Path, asked: dict[str, Any]) -> None:
        self.asked = asked
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 it is read after the process has ended
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
        """What a row says besides its case, or what went wrong."""
        found, _ = self._process.communicate("measure\n" if self._compiled else None)
        if self._process.returncode:
            self._errors.seek(0)
            return (self._errors.read().strip().splitlines() or ["no error was told"])[-1][:300]
        return json.loads(found.splitlines()[-1])


def worker(asked: dict[str, Any]) -> None:
    """In a process of its own: compile a case, say so, wait for a line, measure, print what was found."""
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
    measuring._forget = lambda: None  # what has been compiled is to be run
    print("compiled", flush=True)
    if not sys.stdin.readline():
        return
    params = jax.block_until_ready(init(case.config, jax.random.key(0), case.dtype))
    row = measuring.measure(case, params, floor.bandwidth(jax.devices()[0].device_kind), None)
    print(json.dumps(row | seconds))


def table(rows: list[dict[str, Any]]) -> str:
    """Times and bytes of both versions and how they compare, one line per case."""
    found = {(row["version"], row["policy"], row["context"], row["batch"]): row for row in rows}
    lines = ["| policy | case | " + " | ".join((*TIMES, *BYTES)) + " |", "| --- | --- |" + " ---: |" * 6]
    for _, *case in [key for key in found if key[0] == VERSIONS[0]]:
        older, newer = (found.get((version, *case)) for version in VERSIONS)
        if older is None or newer is None:
            continue
        cells = [_compared(older.get(name), newer.get(name)) for name in (*TIMES, *BYTES)]
        lines.append(f"| `{case[0]}` | {case[1]} x {case[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
