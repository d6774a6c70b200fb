"""Measure prefill and decoding by policy at the shapes of real models, beside the bandwidth bound and, if asked for, peers.

    python -m benchmarks.decode --grid --peers --compile-jobs 14    # writes benchmarks/results/decode-<device>.json
    python -m benchmarks.decode --shape llama-3.1-8b --context 16384,65536 --batch 1,8 --policies full,treekv:0.2

Rows are those of `kvjax bench`. First, tokens and log-probabilities of a small model on this device are compared with
the CPU's. With `--peers`, transformers and kvpress follow at the shapes that have a prefill (`benchmarks.peers`). With
`--devices N`, N GPUs of the host share kvjax's cases. Peers run one case at a time, because their times depend on the
host. An interrupted run continues if it is started again with the same file.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

from kvjax.bench.case import Case
from kvjax.bench.results import Results
from kvjax.bench.runner import Worker, environments, run
from kvjax.cli.bench import draw, print_row, read_cases

_SPARSER = "catekv:eta=0.7,share_adaptive=0.3"
_POLICIES = f"full,treekv:0.2,chunkkv:0.2,chelsea:0.2,catekv:share_adaptive=0.4,{_SPARSER},clusterkv:1024,quest:1024"

GRID = (
    (_POLICIES, "16384,32768,65536", "1,8", False),
    (f"{_POLICIES},snapkv:0.2,chunkkv:0.2,reuse=2", "32768,65536", "1", True),
    ("full", "16384", "1,8", True),
    ("full,chelsea:0.2", "65536", "largest", False),
    ("full,clusterkv:1024", "32768", "largest", False),
    (f"full,{_SPARSER}", "40960", "largest", False),
    (f"full,{_SPARSER}", "512000", "1", False),
)
"""Policies, lengths and batch sizes of `--grid`, and whether the prompt is prefilled.

Times per token are measured without prefill, which is faster. The largest batches are those of the papers' comparisons.
"""

_APART = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of processes that share the device."""

PEERS = 16384, 65536
"""Lengths of the prompts that peers read in `--grid`, in batches that the full cache has been measured with."""


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument(
        "--grid", action="store_true", help="instead of --context, --batch, --policies and --skip-prefill"
    )
    parser.add_argument("--context", default="16384")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--policies", default="full,streaming_llm:0.2,treekv:0.2", help="as for `kvjax bench`")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="float", help="float, int8 or int4; several separated by commas")
    parser.add_argument("--mesh", default="", help="devices that share each case, such as model=2")
    parser.add_argument("--bandwidth", type=float, help="bytes per second, for the bandwidth bound")
    parser.add_argument("--memory", type=int, help="bytes to use")
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--case-seconds", type=float, default=600)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share kvjax's cases")
    parser.add_argument("--peers", action="store_true", help="measure transformers and kvpress, too")
    parser.add_argument(
        "--kvpress-path",
        type=Path,
        help="folder with kvpress and a matching version of transformers, for its worker alone",
    )
    parser.add_argument(
        "--compile-jobs", type=int, default=0, help="number of processes that compile all programs first"
    )
    parser.add_argument("--unchecked", action="store_true", help="do not compare with the CPU first")
    parser.add_argument("--plot", type=Path, help="folder for figures")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if args.kvpress_path is not None and not args.kvpress_path.is_dir():
        parser.error(f"{args.kvpress_path} is no folder")
    try:
        environments(args.devices)
    except ValueError as error:
        parser.error(str(error))
    out = args.out or Path(f"benchmarks/results/decode-{_in_a_process('report.device_slug()')}.json")
    given = ((args.policies, args.context, args.batch, not args.skip_prefill),)
    parts = [
        read_cases(
            policies,
            None,
            args.shape,
            context,
            batch,
            args.new_tokens,
            not prefill,
            "bfloat16",
            args.layers,
            args.weights,
            args.mesh,
        )
        for policies, context, batch, prefill in (GRID if args.grid else given)
    ]
    cases = [case for part in parts for case in part]
    options = {"bandwidth": args.bandwidth, "memory": args.memory, "compilation_cache": True}
    command = [sys.executable, "-m", "kvjax.bench.worker"]
    workers = {"kvjax": [*command, json.dumps(options)]}
    with ThreadPoolExecutor(1) as beside:
        checked = None if args.unchecked else beside.submit(_in_a_process, "decode.check()")
        if args.compile_jobs:
            compiling = [*command, json.dumps(options | {"compile_only": True})]
            missing = Results(out, cases, {}, print_row).missing()
            compile_ahead(missing, compiling, args.compile_jobs, args.devices)
    error = None if checked is None else float(checked.result())
    if error is not None:
        print(f"largest difference from the CPU, in log-probability: {error:.1e}", flush=True)
    env = {}
    if args.peers:
        from benchmarks import peers

        cases += peers.cases([case for case in cases if case.context in PEERS or not args.grid])
        workers |= {program: [sys.executable, "-m", "benchmarks.peers"] for program in peers.PROGRAMS}
        if args.kvpress_path is not None:
            env[peers.PROGRAMS[2]] = imports_first(args.kvpress_path)
    rows = run(
        cases,
        workers,
        out,
        devices=args.devices,
        budget_seconds=args.budget_seconds,
        case_seconds=args.case_seconds,
        said=print_row,
        facts={} if error is None else {"error_vs_cpu": error},
        env=env,
    )
    if args.plot is not None:
        draw(rows, args.plot)


def imports_first(folder: Path) -> dict[str, str]:
    """The environment in which Python imports what this folder has before what is installed."""
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder.resolve()), *([known] if known else [])])}


def compile_ahead(
    cases: Sequence[Case],
    command: Sequence[str],
    jobs: int,
    devices: int = 1,
    seconds: float = float("inf"),
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Compile the programs of all cases into the compilation cache, several at a time, before anything is measured.

    Args:
        seconds: maximum time. Other programs are compiled when they are measured.
        env: additional environment variables of the processes of a `Case.program`.

    Raises:
        ValueError: there are fewer devices.
    """
    places, end = environments(devices), time.monotonic() + seconds
    waiting = Queue()
    for case in sorted(cases, key=_compiles_soon):
        waiting.put(case)

    def left() -> float:
        return min(600, end - time.monotonic())

    def work(job: int) -> None:
        worker, program = None, ""
        with contextlib.suppress(Empty):
            while left() > 0:
                case = waiting.get_nowait()
                if worker is not None and not (worker.alive and program == case.program):
                    worker.close()
                    worker = None
                try:
                    apart = {**_APART, **(env or {}).get(case.program, {}), **places[job % devices]}
                    worker, program = worker or Worker(command, left(), apart), case.program
                    found = worker.measure(case, left())
                except RuntimeError as error:  # it does not start, which measuring it will say, too
                    found = {"failed": str(error)}
                said = found.get("failed") or f"{found['compile_s']:.1f} s"
                over = f" over {case.mesh}" if case.mesh else ""
                line = f"compiled {case.policy} {case.context} x {case.batch}{over}: {said}"
                print(" ".join(line.split())[:200], flush=True)
        if worker is not None:
            worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))


def _compiles_soon(case: Case) -> tuple[bool, bool]:
    """Sorts cases: what takes longest is begun first, so that no process is left with it at the end."""
    return case.policy not in ("chelsea", "clusterkv"), not case.prefill


def _in_a_process(expression: str) -> str:
    """What an expression is, in a process that gives the device back."""
    command = [sys.executable, "-c", f"from benchmarks import decode, report; print({expression})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_APART)
    if done.returncode:
        raise SystemExit(f"{expression} failed:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]


def check() -> float:
    """Largest difference of log-probabilities between this device and the CPU, both in float32 with exact matmuls.

    The CPU's results are what the tests hold against float64 NumPy oracles.
    """
    import jax
    import numpy as np

    import kvjax
    from kvjax.config import RopeConfig
    from kvjax.models import ModelConfig, init

    config = ModelConfig.uniform("llama", 97, 64, 128, 3, 4, 2, 16, 512, RopeConfig(1e4, 16))
    worst = 0.0
    checked = (
        kvjax.get_policy("full"),
        kvjax.TreeKV(budget=48, sinks=2, block=8),
        kvjax.StreamingLLM(budget=48),
        kvjax.get_policy("quest", budget=48, page=8, dense_layers=0),
        kvjax.get_policy("chelsea", budget=48, chunk=32, every=8, sinks=2, recent=8),
    )
    for policy in checked:
        results = []
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            with jax.default_device(device), jax.default_matmul_precision("highest"):
                params = init(config, jax.random.key(1))
                prompts = [list(range(90)), [5, 4, 3], [7] * 60]
                results.append(kvjax.generate(params, prompts, policy=policy, max_new_tokens=40))
        for got, want in zip(*results, strict=True):
            assert got.tokens == want.tokens, (policy, got.tokens, want.tokens)
            worst = max(worst, float(np.max(np.abs(np.subtract(got.logprobs, want.logprobs)))))
    return worst


if __name__ == "__main__":
    main()
