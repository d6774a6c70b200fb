"""Prefill and decoding of an older version of kvjax beside this one's, case by case on one device.

    git archive --prefix=older/ COMMIT | tar x -C /tmp
    python -m benchmarks.beside /tmp/older --context 16384,65536 --jobs 12 --out benchmarks/results/beside-h200.json

Each case of each version is a process of its own. So many of `--jobs` compile beside each other; one at a time has the device to
measure, older and newer version of a case in no fixed order. Without XLA's autotuning (`XLA_FLAGS="--xla_gpu_autotune_level=0
--xla_gpu_enable_triton_gemm=false"`) both have the same matrix products, and nothing else uses the device meanwhile.
A run that is cut short goes on where it was, if it is started again with the same file.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

POLICIES = "full,treekv:0.2,chunkkv:0.2,chelsea:0.2,catekv:share_adaptive=0.4,clusterkv:1024,quest:1024"
VERSIONS = "older", "newer"
TIMES = "ttft_s", "tpot_ms", "compile_s"
BYTES = "cache_bytes", "peak_bytes", "cache_bytes_read"


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
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--lock", type=Path, default=Path("beside.lock"), help="locked by what measures")
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
        "new_tokens": args.new_tokens,
        "layers": args.layers,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    header, rows = report.begun(args.out, report.header(**settings))
    there = [(row["version"], row["policy"], row["context"], row["batch"]) for row in rows]
    wanted = [
        (version, policy, int(context), args.batch)
        for context in args.context.split(",")
        for policy in split_policies(args.policies)
        for version in VERSIONS
    ]
    missing = [case for case in wanted if case not in there]
    shared = {"shape": args.shape, "prefill": not args.skip_prefill, "layers": args.layers} | {
        "new_tokens": args.new_tokens
    }
    writing = threading.Lock()

    def run(case: tuple[str, str, int, int]) -> None:
        version, policy, context, batch = case
        asked = {"policy": policy, "context": context, "batch": batch, **shared}
        command = [sys.executable, "-P", __file__, json.dumps(asked | {"lock": str(args.lock.resolve())})]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trees[version]), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=trees[version])
        if done.returncode:
            tqdm.write(f"{version} {policy} {context} x {batch}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            return
        with writing:
            rows.append({"version": version, **asked, **json.loads(done.stdout.splitlines()[-1])})
            report.write(args.out, header, rows)
            tqdm.write(f"{version} {policy} {context} x {batch}: {rows[-1]['tpot_ms']:.3f} ms per token")

    with ThreadPoolExecutor(args.jobs) as pool:
        list(tqdm(pool.map(run, missing), total=len(missing), unit="case"))
    print(table(rows))


def worker(asked: dict[str, Any]) -> None:
    """In a process of its own, with one version's kvjax: compile a case, wait for the device, measure, print a row."""
    import importlib

    import jax
    from filelock import FileLock

    from kvjax.bench import case as cases
    from kvjax.bench import floor
    from kvjax.models import init

    try:
        measuring = importlib.import_module("kvjax.bench.measure")
    except ModuleNotFoundError:  # its older name
        measuring = importlib.import_module("kvjax.bench.measuring")
    lock = asked.pop("lock")
    policy, settings = cases.read_policy(asked.pop("policy"))
    case = cases.Case(policy, settings, **asked)
    seconds = measuring.compile_only(case)
    measuring._forget = lambda: None  # what has been compiled is to be run
    with FileLock(lock):
        params = jax.block_until_ready(init(case.config, jax.random.key(0), case.dtype))
        row = measuring.measure(case, params, floor.bandwidth(jax.devices()[0].device_kind), None)
    print(json.dumps(row | seconds))


def table(rows: list[dict[str, Any]]) -> str:
    """Times and bytes of both versions and how they compare, one line per case."""
    found = {(row["version"], row["policy"], row["context"], row["batch"]): row for row in rows}
    lines = ["| policy | case | " + " | ".join((*TIMES, *BYTES)) + " |", "| --- | --- |" + " ---: |" * 6]
    for _, *case in [key for key in found if key[0] == VERSIONS[0]]:
        pair = [found.get((version, *case)) for version in VERSIONS]
        if None in pair:
            continue
        cells = [_compared(*(row[name] for row in pair)) for name in (*TIMES, *BYTES)]  # pyright: ignore
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
