"""Measure the memory of decoding few and many tokens, with and without a budget.

    python -m benchmarks.constant_memory

A small random model decodes 1k and 32k tokens. Each row has

- bytes of the cache;
- bytes of the compiled decode program: arguments, temporaries and results, without shared memory;
- the process's peak resident memory.

With TreeKV, none of them may grow with the number of tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import kvjax
from benchmarks import report
from kvjax.config import RopeConfig
from kvjax.models import ModelConfig, init
from kvjax.policies.text import split_policies
from kvjax.runtime import decoding

CONFIG = ModelConfig.uniform(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=2048,
    rope=RopeConfig(theta=10000.0, dim=64),
    tied=True,
)
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 512, size=1500)]


def main() -> None:
    """Run each case in its own process, so that each has its own peak of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policies", default="treekv,full")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/constant-memory.json"))
    parser.add_argument("--one", nargs=2, metavar=("POLICY", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], args.budget, int(args.one[1]))))
        return
    rows = []
    header = report.header(budget=args.budget, prompt_tokens=len(PROMPT), model="random, 4 layers")
    for policy in split_policies(args.policies):
        for tokens in args.tokens:
            one = ["--budget", str(args.budget), "--one", policy, str(tokens)]
            command = [sys.executable, "-m", "benchmarks.constant_memory", *one]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            report.write(args.out, header, rows)


def measure(name: str, budget: int, tokens: int) -> dict[str, object]:
    """Decode `tokens` tokens, and return a row."""
    params = init(CONFIG, jax.random.key(0))
    policy = kvjax.get_policy(name) if name == "full" else kvjax.get_policy(name, budget=budget)
    result = kvjax.generate(params, PROMPT, policy=policy, max_new_tokens=tokens, ignore_eos=True)
    assert len(result.tokens) == tokens
    (program,) = decoding.decode.executables
    memory = program.memory_analysis()
    return {
        "policy": name,
        "new_tokens": tokens,
        "cache_bytes": result.stats.cache_bytes,
        "program_bytes": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "decode_s": result.stats.decode_seconds,
    }


if __name__ == "__main__":
    main()
