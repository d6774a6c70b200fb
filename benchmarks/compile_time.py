"""Measure how long the programs of policies take to trace and to compile, without cached programs.

    git archive --prefix=older/ COMMIT | tar x -C /tmp
    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.compile_time --older /tmp/older --policies clusterkv:1024,rkv:1024

Each policy and version has its own process, and compiles the prefill program and the decode program one after the
other. `trace_s` is JAX's tracing and lowering, and `compile_s` XLA's time. With `--autotuning`, a second run compiles
without autotuning, and `autotune_s` is the difference. No weights are allocated.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

WITHOUT_AUTOTUNING = "--xla_gpu_autotune_level=0"

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "trace_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
"""Durations that JAX reports, and the columns that they are added to."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", type=Path, help="folder with an older version's source tree, measured first")
    parser.add_argument("--policies", default="full,clusterkv:1024,rkv:1024,chelsea:0.2,catekv:share_adaptive=0.4")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--autotuning", action="store_true", help="also measure without autotuning")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, args)))
        return
    from benchmarks import report
    from kvjax.policies.text import split_policies

    out = args.out or Path(f"benchmarks/results/compile-time-{report.device_slug()}.json")
    trees = {} if args.older is None else {"older": args.older.resolve()}
    trees["newer"] = Path(__file__).resolve().parents[1]
    rows: list[dict[str, Any]] = []
    for policy in map(str, split_policies(args.policies)):
        for version, tree in trees.items():
            row = {"version": version, **in_process(tree, policy, "")}
            if args.autotuning:
                row["autotune_s"] = row["compile_s"] - in_process(tree, policy, WITHOUT_AUTOTUNING)["compile_s"]
            print(json.dumps(row), flush=True)
            rows.append(row)
            report.write(out, report.header(weights="none"), rows)


def in_process(tree: Path, policy: str, flags: str) -> dict[str, Any]:
    """Measure a policy in a process of its own, which imports kvjax from `tree`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(tree), *others])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", policy]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of tracing and compiling the two programs of a policy in this process."""
    import jax

    from kvjax.bench.case import Case, read_policy

    name, settings = read_policy(policy)
    case = Case(name, settings, args.context, args.batch, args.shape, dtype="bfloat16", layers=args.layers)
    engine, spent = case.engine(case.shapes, args.batch), defaultdict(float)

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in EVENTS:
            spent[EVENTS[event]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    engine.executables()
    layers = case.config.num_layers
    return {"policy": policy, "context": args.context, "rows": args.batch, "layers": layers, **spent}


if __name__ == "__main__":
    main()
