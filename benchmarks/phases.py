"""Measure a decode step whose rows are out of phase beside one whose rows are aligned, with random weights.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.phases --policies rkv:1024,chelsea:1024 --rows 64

Policies that compress at intervals compress aligned rows in the same step. Rows that were inserted at different times
are due at different times. The batch is filled with one prompt in both cases: all rows at once, or one row after every
few steps, so that the rows' phases are spread over an interval of `--apart` times the number of rows.
"""

import argparse
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from kvjax._util.randomness import random_key
from kvjax.config import PRESETS
from kvjax.models import init
from kvjax.policies.text import split_policies
from kvjax.runtime.batch import Batch, Job

CALL = 64
"""Steps of a call."""


def step_ms(batch: Batch, job: Job, apart: int, steps: int) -> float:
    """Milliseconds of a step, on average, after the rows were filled `apart` steps one after the other."""
    batch.reset()
    batch.admit([job], [0])
    reading = batch.again(0)
    for row in range(batch.rows):
        batch.insert(reading, dataclasses.replace(job, seed=row), row)
        if apart:
            batch.serve(apart)
    batch.serve(CALL)
    jax.block_until_ready(batch.state)
    start = time.perf_counter()
    for _ in range(steps // CALL):
        batch.serve(CALL)
    jax.block_until_ready(batch.state)
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--policies", default="rkv:1024,chelsea:1024,clusterkv:1024,recompress(snapkv:1024)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--apart", type=int, default=2, help="steps between two rows that are out of phase")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.shape]
    if args.layers is not None:
        config = config.with_depth(args.layers)
    out = args.out or Path(f"benchmarks/results/phases-{report.device_slug()}.json")
    header, rows = report.begun(out, report.header(weights="random"))
    params = init(config, random_key(0), "bfloat16")
    new = args.steps + CALL + args.apart * args.rows + CALL
    job = Job(np.random.default_rng(0).integers(0, config.vocab_size - 300, args.prompt).tolist(), new)

    def made(policy: str) -> Batch:
        batch = Batch(params, policy, rows=args.rows, prompt_len=args.prompt, max_new_tokens=new, ends=1)
        batch.compile([args.prompt], 3)
        return batch

    policies = [str(policy) for policy in split_policies(args.policies)]
    with ThreadPoolExecutor(len(policies)) as pool:
        for policy, batch in zip(policies, list(pool.map(made, policies)), strict=True):
            row: dict[str, Any] = {
                "policy": policy,
                "rows": args.rows,
                "prompt": args.prompt,
                "layers": config.num_layers,
            }
            step_ms(batch, job, 0, CALL)  # the first run is slower
            row["aligned_ms"] = step_ms(batch, job, 0, args.steps)
            row["apart_ms"] = step_ms(batch, job, args.apart, args.steps)
            row["ratio"] = row["apart_ms"] / row["aligned_ms"]
            row["row_bytes"] = batch.row_bytes
            print(json.dumps(row), flush=True)
            rows.append(row)
            report.write(out, header, rows)
            batch.free()


if __name__ == "__main__":
    main()
