"""Measure chunked prefill of texts whose full cache would not fit the device, with random weights.

    python -m benchmarks.long_context --policies snapkv:4096,chelsea:16384 --tokens 1003520
    python -m benchmarks.long_context --policies treekv:4096 --tokens 10002432
    python -m benchmarks.long_context --policies snapkv:0.2 --tokens 65536
    python -m benchmarks.long_context --policies full --tokens 65536 --block 0    # the whole prompt at once

A random text is prefilled block by block, and some tokens are generated after it. A row has

- the number of tokens and the seconds that they took, at the end and at ten points on the way;
- `ideal_seconds`: the operations of matmuls and of attention, each divided by the rate that it reaches on an H200;
- bytes of the cache, of the program that prefills a block (all memory of the run), and of a full cache;
- the peak of memory in use, as the device reports it.

Over a mesh (`--mesh model=2`), bytes are those of each device. If `--seconds` ends a run, its row has the tokens until
then.

Rows that the result file already has are not measured again, so a run can be interrupted at any time. With `--lock
FILE`, several runs compile at the same time and measure one after the other.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks import report
from kvjax.bench.case import Case, read_policy
from kvjax.models import Params
from kvjax.models.sharding import bytes_per_device, compile_init_on, init_on
from kvjax.policies.text import split_policies
from kvjax.runtime.decoding import Decoding
from kvjax.runtime.engine import Engine, program_bytes

MARKS = 10
"""Number of points on the way at which time and memory are recorded."""

NEW_TOKENS = 16
"""Tokens generated after the text."""

MATRICES, ATTENTION = 700e12, 600e12
"""Operations per second in bfloat16 that matmuls and flash attention reach on an H200."""


def main() -> None:
    """Measure one policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mesh", default="", help="mesh of devices, such as model=2")
    parser.add_argument("--compile-only", action="store_true", help="only fill the compilation cache")
    parser.add_argument("--policies", default="chelsea:16384", help="as for `kvjax bench`")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=4096, help="block size in tokens; 0 prefills the whole prompt")
    parser.add_argument("--compile-jobs", type=int, default=6, help="number of programs that compile at the same time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="maximum time of prefill, for each policy")
    parser.add_argument("--lock", type=Path, help="file that is locked while a policy is measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(f"benchmarks/results/long-context-{report.device_slug()}.json")
    mine = report.header(shape=args.shape, layers=args.layers, dtype=args.dtype, weights="random")
    there = [
        (row["policy"], row["settings"], row["tokens"], row["block"], row.get("mesh", ""))
        for row in report.begun(out, mine)[1]
    ]
    cases = []
    for text in split_policies(args.policies):
        name, settings = read_policy(text)
        if (name, settings, args.tokens, args.block, args.mesh) not in there:
            given = {"dtype": args.dtype, "layers": args.layers, "mesh": args.mesh}
            cases.append(Case(name, settings, args.tokens, 1, args.shape, **given))
    if not cases:
        return print(f"{out} has all of them")
    first = cases[0]
    if args.compile_only:
        compile_init_on(first.shard, first.config, first.dtype)
        params = first.shapes
    else:
        params = init_on(first.shard, first.config, jax.random.key(0), first.dtype)

    with ThreadPoolExecutor(args.compile_jobs) as pool:
        made = pool.map(lambda case: compiled(case, params, args.block), cases)
        engines = list(tqdm(made, total=len(cases), unit="policy", desc="compiling"))
    for case, engine in () if args.compile_only else zip(cases, engines, strict=True):
        with report.alone(args.lock):
            row = measure(case, engine, args.seconds)
            header, rows = report.begun(out, mine)
            report.write(out, header, [*rows, row])
        print("{policy}: {tokens_read} tokens in {seconds:.1f} s, cache {cache_bytes} B".format(**row), flush=True)


def compiled(case: Case, params: Params, block: int) -> Engine:
    """Return an engine whose programs are compiled."""
    sizes = {
        "prompt_len": case.context,
        "max_new_tokens": NEW_TOKENS,
        "block": block or None,
        "mesh": case.mesh or None,
    }
    engine = Engine(params, case.bound_policy(), **sizes)
    engine.executables()
    return engine


def measure(case: Case, engine: Engine, seconds: float) -> dict[str, Any]:
    """Prefill the whole blocks of `case.context` tokens, as many as there is time for, and generate some tokens."""
    read = read_in_blocks if engine.block else read_at_once
    program, _ = engine.executables()
    state, marks = read(case, engine, seconds, program)
    tokens, caches = int(state.pos[0]), bytes_per_device(state.caches)
    state, written, _ = engine.decode(state, NEW_TOKENS)
    return {
        "policy": case.policy,
        "settings": case.settings,
        "tokens": case.context,
        "block": engine.block,
        "mesh": case.mesh,
        "tokens_read": tokens,
        "seconds": marks[-1]["seconds"],
        "ideal_seconds": ideal_seconds(engine, tokens),
        "marks": marks,
        "written": np.asarray(written)[0, : int(state.steps)].tolist(),
        "cache_bytes": caches,
        "program_bytes": program_bytes(program),
        "peak_bytes": in_use("peak_bytes_in_use"),
        "full_cache_bytes": engine.full_cache_bytes,
    }


def read_at_once(case: Case, engine: Engine, seconds: float, program: Any) -> tuple[Decoding, list[dict[str, Any]]]:
    """Prefill a whole prompt. Returns the state, and the time of the second run, as the first also fills the device's caches."""
    prompt = np.random.default_rng(1).integers(0, engine.config.vocab_size, (1, case.context))
    jax.block_until_ready(engine.prefill(prompt))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(engine.prefill(prompt))
    taken = time.perf_counter() - start
    return state, [{"tokens": case.context, "seconds": taken}]


def read_in_blocks(case: Case, engine: Engine, seconds: float, program: Any) -> tuple[Decoding, list[dict[str, Any]]]:
    """Prefill block by block. Returns the state, and the time and memory in use at `MARKS` points."""
    state, size, marks = engine.begin(), engine.block or 1, []
    blocks, random = case.context // size, np.random.default_rng(1)
    start = time.perf_counter()
    progress = tqdm(total=case.context, unit="token", unit_scale=True, desc=case.policy)
    for i in range(blocks):
        tokens = random.integers(0, engine.config.vocab_size, (1, size)).tolist()
        state, _ = jax.block_until_ready(engine.extend(state, tokens))
        taken = time.perf_counter() - start
        progress.update(size)
        progress.set_postfix_str(f"{(in_use('peak_bytes_in_use') or program_bytes(program)) / 1e9:.1f} GB")
        if (i + 1) * MARKS // blocks > i * MARKS // blocks or taken > seconds:
            marks.append({"tokens": (i + 1) * size, "seconds": taken, "in_use_bytes": in_use("bytes_in_use")})
        if taken > seconds:
            break
    progress.close()
    return state, marks


def ideal_seconds(engine: Engine, tokens: int) -> float:
    """Time of prefill if all devices reached the rates above.

    A token takes two operations per weight of the layers, and four per channel of a query and slot that it attends to.
    """
    config, block = engine.config, engine.block or tokens
    weights = sum(leaf.size for leaf in jax.tree.leaves(engine.weights.layers))
    slots = [min(layer.max_kept, max(tokens - block, 0)) + block / 2 for layer in engine.layers]
    attention = 4 * config.num_heads * config.head_dim * sum(slots)
    return tokens * (2 * weights / MATRICES + attention / ATTENTION) / engine.shard.devices


def in_use(which: str) -> int | None:
    """A number of the device's memory statistics, such as bytes in use. None if the device does not report it."""
    return (jax.devices()[0].memory_stats() or {}).get(which)


if __name__ == "__main__":
    main()
