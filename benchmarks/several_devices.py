"""Measure decoding and chunked prefill over two GPUs of one host, beside one of them in the same run.

    python -m benchmarks.several_devices --compile-jobs 20 --seconds 480

1. All programs are compiled at the same time, into JAX's cache on disk.
2. The cases of `PARTS` are measured one after the other, in a process that sees both GPUs.
3. A long text is prefilled in blocks (`READ`, by `benchmarks.long_context`, with its own result file).
4. The cases of `TRIED` are measured with each of `VARIANTS`, other ways to all-reduce. The row's `program` names the way.
5. Another long text is prefilled.

Each row is written as soon as it is measured. A case that fails, or takes too long, has a row with the error. If the
time runs out, a run with the same file measures what is missing. Rows are those of `kvjax bench`. Over a mesh, weights
and filled caches are made in shards, and bytes and the bandwidth bound are those of each device.

Compare rows over `data=2` with one GPU and half of the sequences, which does the same work as each of the two GPUs.
With all sequences on one GPU, its weights are read once instead of twice.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.decode import compile_ahead
from kvjax.bench.case import Case, read_policy
from kvjax.bench.results import Results
from kvjax.bench.runner import run
from kvjax.cli.bench import print_row
from kvjax.runtime.program import CUDA_GRAPH_OPTIONS

_EIGHT, _SEVENTY = "llama-3.1-8b", "llama-3.1-70b"

PARTS = (
    (_EIGHT, "full", 65536, 8, "model=2"),
    (_EIGHT, "full", 16384, 1, "model=2"),
    (_SEVENTY, "full", 16384, 1, "model=2"),
    (_SEVENTY, "full", 16384, 8, "model=2"),
    (_EIGHT, "full", 65536, 8, "data=2"),
    (_EIGHT, "full", 65536, 4, ""),
    (_EIGHT, "full", 65536, 8, ""),
    (_EIGHT, "full", 16384, 1, ""),
    (_EIGHT, "full", 1_048_576, 1, "sequence=2"),
    *(
        (_SEVENTY, policy, 16384, batch, "model=2")
        for policy in ("chunkkv:0.2", "treekv:0.2", "chelsea:0.2")
        for batch in (1, 8)
    ),
)
"""Shape, policy, tokens, rows and mesh. The most important cases come first."""

TRIED = (
    (_EIGHT, "full", 16384, 1, "model=2"),
    (_EIGHT, "full", 65536, 8, "model=2"),
    (_SEVENTY, "full", 16384, 1, "model=2"),
)
"""Cases that are measured with each of `VARIANTS`."""

_KERNELS = "--xla_gpu_experimental_use_collective_kernels="

VARIANTS = {
    "all-reduces outside of the graph": f"--xla_gpu_enable_command_buffer={CUDA_GRAPH_OPTIONS['xla_gpu_enable_command_buffer']} {_KERNELS}",
    "XLA's all-reduces in the graph": f"{_KERNELS}ALL_REDUCE",
}
"""Other ways to all-reduce, by XLA's flags."""

READ = (("snapkv:4096", 1_015_808, 16384), ("snapkv:4096", 1_003_520, 4096))
"""Policy, tokens, and block size. Each text is prefilled by one GPU and over `model=2`."""

_READ_SECONDS = 45
"""Maximum time of one of them. Its row has the tokens until then."""

_SHARED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""Also caches small programs on disk, such as those that make weights."""


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile-jobs",
        type=int,
        default=20,
        help="number of processes that compile at the same time; 0 does not compile ahead",
    )
    parser.add_argument("--compile-seconds", type=float, default=200, help="maximum time to compile ahead")
    parser.add_argument("--case-seconds", type=float, default=90, help="maximum time of a row")
    parser.add_argument("--seconds", type=float, default=480, help="maximum time of the run")
    parser.add_argument("--shape", help="replaces both shapes, for a trial")
    parser.add_argument("--layers", type=int, help="number of layers of each model, for a trial")
    parser.add_argument("--scale", type=int, default=1, help="divides the numbers of tokens, for a trial")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument(
        "--memory-fraction", default="0.92", help="fraction of each GPU's memory for JAX; the rest is for NCCL and CUDA"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode-two-h200.json"))
    parser.add_argument("--out-read", type=Path, default=Path("benchmarks/results/long-context-two-h200.json"))
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    os.environ.update(_SHARED)
    cases, env = chosen(args)
    options = {"bandwidth": None, "memory": None, "compilation_cache": True}
    command = [sys.executable, "-m", "kvjax.bench.worker"]
    reading = [_reading(args, *each, mesh) for each in READ for mesh in ("model=2", "")]
    if args.compile_jobs:
        apart = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        beside = [subprocess.Popen([*each, "--compile-only"], env=apart) for each in reading]
        missing = Results(args.out, cases, {}, print_row).missing()
        missing.sort(key=lambda case: (-case.config.num_layers, case.policy != "chelsea"))
        compiling = [*command, json.dumps(options | {"compile_only": True})]
        stop = time.monotonic() + args.compile_seconds
        compile_ahead(missing, compiling, args.compile_jobs, seconds=args.compile_seconds, env=env)
        for process in beside:
            _wait(process, stop - time.monotonic())
        print(f"compiled by {args.seconds - (end - time.monotonic()):.0f} s", flush=True)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = args.memory_fraction
    commands = {case.program: [*command, json.dumps(options)] for case in cases}

    def measure(chosen: Sequence[Case]) -> None:
        if end > time.monotonic():
            budget = {"budget_seconds": end - time.monotonic(), "case_seconds": args.case_seconds}
            run(chosen, commands, args.out, said=print_row, env=env, **budget)

    def read(number: int) -> None:
        for each in reading[2 * number : 2 * number + 2]:
            if end - time.monotonic() > 10:
                _wait(subprocess.Popen(each), min(end - time.monotonic(), args.case_seconds))

    try:
        measure([case for case in cases if case.program == cases[0].program])
    finally:
        read(0)
        measure(cases)
        read(1)
        print(f"ended after {args.seconds - (end - time.monotonic()):.0f} s", flush=True)


def chosen(args: argparse.Namespace) -> tuple[list[Case], dict[str, dict[str, str]]]:
    """Return the cases, and the environment variables of the processes of each program."""

    def case(shape: str, policy: str, context: int, batch: int, mesh: str, program: str = "kvjax") -> Case:
        name, settings = read_policy(policy)
        return Case(
            name,
            settings,
            context // args.scale,
            batch,
            args.shape or shape,
            args.new_tokens,
            prefill=False,
            layers=args.layers,
            program=program,
            mesh=mesh,
        )

    cases, env = [case(*part) for part in PARTS], {}
    for name, flags in VARIANTS.items():
        program = f"kvjax, {name}"
        env[program] = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
        cases += [case(*part, program) for part in TRIED]
    return cases, env


def _reading(args: argparse.Namespace, policy: str, tokens: int, block: int, mesh: str) -> Sequence[str]:
    """Return the command that prefills one text."""
    asked = {"policies": policy, "tokens": tokens // args.scale, "block": block // args.scale, "mesh": mesh}
    asked |= {"out": args.out_read, "seconds": _READ_SECONDS} | ({} if args.layers is None else {"layers": args.layers})
    options = [f"--{name}={value}" for name, value in asked.items()]
    return [sys.executable, "-m", "benchmarks.long_context", "--shape", args.shape or _EIGHT, *options]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a process has ended, and kill it after `seconds`."""
    try:
        process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
