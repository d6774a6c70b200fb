"""Measure memory and time of the prefill of a batch, whole and a few rows at a time, with random weights.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.prefill_memory full:8x16384+16 rkv:1024:256x400+4096:compile
    python -m benchmarks.prefill_memory full:8x65536+16 --mesh model=2

A case is `POLICY:ROWSxPROMPT+NEW`. With `:compile` at its end, memory is that of XLA's analysis and nothing runs. A
program that does not fit is not run either.
"""

import argparse
import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import report
from kvjax._util.randomness import random_key
from kvjax.config import PRESETS
from kvjax.models.sharding import get_shard, init_on
from kvjax.runtime import decoding, reading
from kvjax.runtime.engine import Engine
from kvjax.runtime.memory import memory_limit

CALLS = 3
"""Timed calls, after one that is not."""

WHOLE = 2**31
"""Tokens of a group that holds all rows."""


class Case(NamedTuple):
    """What to prefill."""

    policy: str
    rows: int
    prompt: int
    new: int
    runs: bool


def parsed(text: str) -> Case:
    """A case from its text."""
    found = re.fullmatch(r"(.+):(\d+)x(\d+)\+(\d+)(:compile)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no case; write POLICY:ROWSxPROMPT+NEW, such as full:8x16384+16")
    return Case(found[1], *map(int, found.groups()[1:4]), runs=found[5] is None)


def seconds(engine: Engine, case: Case) -> float:
    """Median seconds until the first tokens."""
    vocabulary = engine.config.vocab_size - 300
    prompts = np.random.default_rng(0).integers(0, vocabulary, (case.rows, case.prompt)).astype(np.int32)
    times = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        state, _ = engine.prefill(prompts)
        jax.block_until_ready(state.token)
        times.append(time.perf_counter() - start)
        for leaf in jax.tree.leaves(state.caches):
            leaf.delete()
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=parsed)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--mesh")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[reading.GROUP_TOKENS], help="padded tokens of a group"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.shape]
    shard = get_shard(args.mesh, config)
    out = args.out or Path(f"benchmarks/results/prefill-memory-{report.device_slug()}.json")
    header, rows = report.begun(out, report.header(weights="random"))
    params = init_on(shard, config, random_key(0), "bfloat16")
    limit = memory_limit(shard)
    for size in (*args.at_once, WHOLE):
        reading.GROUP_TOKENS = size
        decoding.prefill.forget()
        sizes = [{"batch": each.rows, "prompt_len": each.prompt, "max_new_tokens": each.new} for each in args.cases]
        engines = [
            Engine(params, case.policy, mesh=args.mesh, **size) for case, size in zip(args.cases, sizes, strict=True)
        ]
        with ThreadPoolExecutor(len(engines)) as pool:
            memories = list(pool.map(Engine.compile, engines))
        for case, engine, memory in zip(args.cases, engines, memories, strict=True):
            row: dict[str, Any] = {
                **case._asdict(),
                "mesh": args.mesh,
                "together": "whole" if size == WHOLE else size,
                "weights_bytes": memory.weights,
                "cache_bytes": memory.cache,
                "prefill_bytes": memory.prefill,
                "decode_bytes": memory.decode,
            }
            if case.runs and (limit is None or memory.prefill < 0.97 * limit):
                row["seconds"] = seconds(engine, case)
            print(json.dumps(row), flush=True)
            rows.append(row)
            report.write(out, header, rows)


if __name__ == "__main__":
    main()
