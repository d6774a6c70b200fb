"""Prefill and decoding by policy at real models' shapes, beside the memory-bound floor, with peers in the same run if asked for.

    python -m benchmarks.decode --shape llama-3.1-8b --context 16384,65536 --batch 1,8 --policies full,treekv:0.2 --peers

What `kvjax bench` measures, after a check: a small model's tokens and log-probabilities on this device are compared with the
CPU's. With `--peers`, transformers and kvpress follow on the same shapes, see `benchmarks.peers`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from kvjax.bench.running import run
from kvjax.cli.bench import draw, print_row, read_cases

RESULTS = Path("benchmarks/results/decode.json")


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--context", default="16384")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--policies", default="full,streaming_llm:0.2,treekv:0.2", help="as for `kvjax bench`")
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bandwidth", type=float, help="bytes a second, for the floor")
    parser.add_argument("--memory", type=int, help="bytes to use")
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--case-seconds", type=float, default=600)
    parser.add_argument("--peers", action="store_true", help="measure transformers and kvpress, too")
    parser.add_argument("--unchecked", action="store_true", help="do not compare with the CPU first")
    parser.add_argument("--plot", type=Path, help="folder for figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    error = None if args.unchecked else in_a_process()
    if error is not None:
        print(f"largest difference from the CPU, in log-probability: {error:.1e}", flush=True)
    cases = read_cases(
        args.policies, args.shape, args.context, args.batch, args.new_tokens, args.skip_prefill, "bfloat16", args.layers
    )
    options = {"bandwidth": args.bandwidth, "memory": args.memory, "compilation_cache": True}
    workers = {"kvjax": [sys.executable, "-m", "kvjax.bench.worker", json.dumps(options)]}
    if args.peers:
        from benchmarks import peers

        cases += peers.cases(cases)
        workers |= {program: [sys.executable, "-m", "benchmarks.peers"] for program in peers.PROGRAMS}
    rows = run(
        cases,
        workers,
        args.out,
        budget_seconds=args.budget_seconds,
        case_seconds=args.case_seconds,
        said=print_row,
        facts={} if error is None else {"error_vs_cpu": error},
    )
    if args.plot is not None:
        draw(rows, args.plot)


def in_a_process() -> float:
    """What `check` finds, in a process that gives the device back."""
    command = [sys.executable, "-c", "from benchmarks import decode; print(decode.check())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the check against the CPU failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def check() -> float:
    """Largest difference of log-probabilities between this device and the CPU, both in float32 with exact matmuls.

    The CPU's results are what the tests hold against float64 NumPy oracles.
    """
    import jax
    import numpy as np

    import kvjax
    from kvjax.models import ModelConfig, init
    from kvjax.models.rope import RopeConfig

    config = ModelConfig("llama", 97, 64, 128, 3, 4, 2, 16, 512, RopeConfig(1e4, 16))
    worst = 0.0
    for policy in (kvjax.get_policy("full"), kvjax.TreeKV(budget=48, sinks=2, block=8), kvjax.StreamingLLM(budget=48)):
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
