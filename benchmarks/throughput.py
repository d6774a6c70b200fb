"""Measure the throughput of many requests through one running batch, with random weights.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.throughput --trace 128 --policies full,snapkv:1024 --rows 40,128
    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.throughput --same 256,400,4096 --policies rkv:1024 --rows 256

`--trace` has requests whose prompts and answers have different lengths. `--same` has a number of equal requests: prompt
tokens, answer tokens. All requests are known from the start, and no answer ends early. All programs are compiled
before, and one request of each padded size runs first, with an answer of at most 64 tokens. The row has tokens per second, the share of row-steps that gave a
token, and the seconds until the last prompt was read.

    PYTHONPATH=VLLM:. python -m benchmarks.throughput vllm --same 256,400,4096 | tee vllm.jsonl
    python -m benchmarks.throughput --same 256,400,4096 --policies rkv:1024 --rows 256 --peer vllm.jsonl

`vllm` sends equal requests to vLLM, all at once, after eight of them with short answers. Run it on the same machine, with
the GPU to itself. `--peer` adds the lines that it printed. `python -m benchmarks.tables --write` puts both into README.md.
"""

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import first_token, report
from kvjax._util.randomness import random_key
from kvjax.bench.case import bound_policy, read_policy
from kvjax.config import PRESETS, ModelConfig
from kvjax.models import Params, init
from kvjax.policies.text import split_policies
from kvjax.runtime.batch import READ_PARTS, Batch, Job
from kvjax.runtime.scheduler import Scheduler


def mixed(count: int, vocabulary: int, seed: int = 7) -> list[Job]:
    """Requests with 128 to 8,192 prompt tokens and 16 to 1,024 answer tokens, log-normal."""
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(np.log(2500), 0.8, count), 128, 8192).astype(int)
    answers = np.clip(random.lognormal(np.log(250), 0.8, count), 16, 1024).astype(int)
    ids = [random.integers(0, vocabulary - 300, size).tolist() for size in prompts]
    return [Job(prompt, int(answer)) for prompt, answer in zip(ids, answers, strict=True)]


def same(text: str, vocabulary: int) -> list[Job]:
    """Equal requests, with different random tokens: their number, prompt tokens and answer tokens, separated by commas."""
    count, prompt, answer = map(int, text.split(","))
    random = np.random.default_rng(0)
    return [Job(random.integers(0, vocabulary - 300, prompt).tolist(), answer) for _ in range(count)]


def run(batch: Batch, jobs: Sequence[Job], steps: int) -> dict[str, Any]:
    """Run all jobs, those with the longest answers first, and return the measurements."""
    batch.reset()
    scheduler = Scheduler(batch, steps=steps)
    start = time.perf_counter()
    tickets = [scheduler.submit(job) for job in sorted(jobs, key=lambda job: -job.max_new_tokens)]
    read, turns = 0.0, 0
    while scheduler.busy:
        scheduler.turn()
        turns += 1
        if not read and not scheduler.waiting:
            jax.block_until_ready(batch.state)
            read = time.perf_counter() - start
    seconds = time.perf_counter() - start
    for ticket in tickets:
        if ticket.ended != "length" or len(ticket.tokens) != ticket.job.max_new_tokens:
            raise SystemExit(f"a request ended by {ticket.ended} after {len(ticket.tokens)} tokens: {ticket.error}")
    tokens = sum(job.max_new_tokens for job in jobs)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "new_tokens": tokens,
        "last_prompt_read_s": read,
        "delivered": scheduler.delivered / max(scheduler.row_steps, 1),
        "steps": scheduler.row_steps // batch.rows,
        "turns": turns,
    }


def _of_vllm(config: ModelConfig, shape: str, jobs: Sequence[Job], workload: str) -> dict[str, Any]:
    """vLLM's row for equal requests."""
    prompts, new = [list(job.prompt) for job in jobs], jobs[0].max_new_tokens
    generate, about = first_token.vllm(config, len(prompts[0]) + new, devices=1)
    generate(prompts[:8], 8)
    start = time.perf_counter()
    generate(prompts, new)
    seconds = time.perf_counter() - start
    return {
        **about,
        "shape": shape,
        "workload": workload,
        "policy": "full",
        "layers": config.num_layers,
        **report.measured_here(),
        "seconds": seconds,
        "tokens_per_second": len(jobs) * new / seconds,
    }


def fitted(lengths: Sequence[int], count: int) -> list[int] | None:
    """The `count` multiples of 128 that prompts of these lengths are padded to with the fewest tokens in all.

    None for as many as `Batch` has by default, in eighths of the longest.
    """
    if count == len(READ_PARTS):
        return None
    rounded = -(-np.sort(lengths) // 128) * 128
    sizes, repeats = np.unique(rounded, return_counts=True)
    through = np.concatenate(([0], np.cumsum(repeats)))  # prompts of the first sizes
    best: list[tuple[int, list[int]]] = [(0, [])]
    for _ in range(min(count, len(sizes))):
        best = [
            min(
                (
                    best[before][0] + int(sizes[end - 1] * (through[end] - through[before])),
                    [*best[before][1], int(sizes[end - 1])],
                )
                for before in range(min(end, len(best)))
            )
            if end
            else (0, [])
            for end in range(len(sizes) + 1)
        ]
    return best[-1][1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="kvjax", choices=["kvjax", "vllm"])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument(
        "--policies",
        default="full,snapkv:1024",
        help="separated by commas; profile=random for policies that need a profile",
    )
    parser.add_argument("--rows", default="40", help="rows of the batch: one number, or one for each policy")
    parser.add_argument("--trace", type=int, help="number of requests of different lengths")
    parser.add_argument("--same", help="number of requests, prompt tokens, answer tokens")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a call")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--read-sizes",
        type=int,
        default=len(READ_PARTS),
        help="lengths that prompts are padded to: this many, chosen for the least padding; %(default)s: in eighths of the longest",
    )
    parser.add_argument("--together", type=int, default=0, help="tokens of short prompts that are read together")
    parser.add_argument("--jobs", type=int, default=8, help="programs to compile at a time")
    parser.add_argument("--mesh")
    parser.add_argument("--peer", type=Path, help="lines that vLLM's run printed, which are added to the rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.shape]
    if args.layers is not None:
        config = config.with_depth(args.layers)
    if (args.trace is None) == (args.same is None):
        parser.error("give --trace or --same")
    if args.trace is not None:
        jobs, workload = mixed(args.trace, config.vocab_size), f"trace {args.trace}"
    else:
        jobs, workload = same(args.same, config.vocab_size), f"same {args.same}"
    if args.program == "vllm":
        if args.same is None:
            parser.error("vllm takes --same")
        print(json.dumps(_of_vllm(config, args.shape, jobs, workload)), flush=True)
        return
    out = args.out or Path(f"benchmarks/results/throughput-{report.device_slug()}.json")
    header, rows = report.begun(out, report.header(weights="random"))
    params: Params = init(config, random_key(0), "bfloat16")
    longest = max(len(job.prompt) for job in jobs)
    policies, sizes = split_policies(args.policies), list(map(int, args.rows.split(",")))
    for policy, size in zip(policies, sizes * (len(policies) // len(sizes)), strict=True):
        batch = Batch(
            params,
            bound_policy(config, *read_policy(policy)),
            rows=size,
            prompt_len=longest,
            max_new_tokens=max(job.max_new_tokens for job in jobs),
            ends=1,
            read_sizes=fitted([len(job.prompt) for job in jobs], args.read_sizes),
            read_together=args.together,
            mesh=args.mesh,
        )
        start = time.perf_counter()
        predicted = batch.compile([len(job.prompt) for job in jobs], args.jobs)
        compiled = time.perf_counter() - start
        few = {batch.read_size(len(job.prompt)): job for job in jobs}.values()
        short = [dataclasses.replace(job, max_new_tokens=min(job.max_new_tokens, 64)) for job in few]
        first = run(batch, short, args.steps)
        found = run(batch, jobs, args.steps)
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        row = {
            "program": "kvjax",
            "workload": workload,
            "policy": policy,
            "rows": size,
            "read_sizes": args.read_sizes,
            "read_together": args.together,
            "shape": args.shape,
            "layers": config.num_layers,
            **report.measured_here(),
            "device": jax.devices()[0].device_kind,
            **found,
            "row_bytes": batch.row_bytes,
            "compile_s": compiled,
            "warm_up_s": first["seconds"],
            "predicted_bytes": predicted,
            "peak_bytes": peak,
        }
        rows = [
            old
            for old in rows
            if any(old.get(k) != row[k] for k in ("program", "workload", "policy", "rows", "layers"))
        ]
        rows.append(row)
        print(json.dumps(row), flush=True)
        report.write(out, header, rows)
        del batch
        gc.collect()
    if args.peer is not None:
        for line in args.peer.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"program": "vllm"'):
                new = json.loads(line)
                rows = [old for old in rows if any(old.get(k) != new[k] for k in ("program", "workload", "layers"))]
                rows.append(new)
        report.write(out, header, rows)


if __name__ == "__main__":
    main()
