"""A text of which the device could not hold the whole cache: read in blocks to its end, and gone on with.

    python -m benchmarks.long_context --policies chelsea:16384 --tokens 1000000
    python -m benchmarks.long_context --policies treekv:4096 --tokens 10000000 --seconds 720

Random weights read random tokens and then write some. A row has in what time how many were read, beside the time that arithmetic allows
(`ideal_seconds`: operations of the matrices and of attention, each over the rate that it reaches on an H200), bytes of the cache and of
the program that reads a block, which is all the memory that this takes, the most that the device says was in use, and bytes that the full
cache would have. What `--seconds` cuts short says how far it came.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from benchmarks import report
from kvjax.bench.case import Case, read_policy
from kvjax.models import Params, init
from kvjax.policies.text import split_policies
from kvjax.runtime.engine import Engine, program_bytes

MARKS = 10
"""Points on the way of which the time is noted."""

NEW_TOKENS = 16
"""Tokens written after the text."""

MATRICES, ATTENTION = 700e12, 600e12
"""Operations per second in bfloat16 that products of matrices and flash attention reach on an H200."""


def main() -> None:
    """Read with one policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", default="chelsea:16384", help="as for `kvjax bench`")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=4096, help="tokens that are read at a time")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop reading after so long, for each policy"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(f"benchmarks/results/long-context-{report.device_slug()}.json")
    header = report.header(shape=args.shape, layers=args.layers, dtype=args.dtype, weights="random")
    rows, params = [], None
    for text in split_policies(args.policies):
        name, settings = read_policy(text)
        case = Case(name, settings, args.tokens, 1, args.shape, dtype=args.dtype, layers=args.layers)
        params = init(case.config, jax.random.key(0), case.dtype) if params is None else params
        rows.append(measure(case, params, args.block, args.seconds))
        print("{policy}: {tokens_read} tokens in {seconds:.0f} s, cache {cache_bytes} B".format(**rows[-1]), flush=True)
        report.write(out, header, rows)


def measure(case: Case, params: Params, block: int, seconds: float) -> dict[str, Any]:
    """Read `case.context` tokens, less what is no whole block, or as many as there is time for, and write some."""
    engine = Engine(params, case.bound_policy(), prompt_len=case.context, max_new_tokens=NEW_TOKENS, block=block)
    state, blocks = engine.begin(), case.context // engine.block
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.caches))
    program, _ = engine.executables()
    start, marks, random = time.perf_counter(), [], np.random.default_rng(1)
    progress = tqdm(total=case.context, unit="token", unit_scale=True, desc=case.policy)
    for i in range(blocks):
        tokens = random.integers(0, params.config.vocab_size, (1, engine.block)).tolist()
        state, _ = jax.block_until_ready(engine.extend(state, tokens))
        taken = time.perf_counter() - start
        progress.update(engine.block)
        progress.set_postfix_str(f"{(in_use() or program_bytes(program)) / 1e9:.1f} GB")
        if (i + 1) * MARKS // blocks > i * MARKS // blocks or taken > seconds:
            marks.append({"tokens": (i + 1) * engine.block, "seconds": taken})
        if taken > seconds:
            break
    progress.close()
    read = int(state.pos[0])
    state, written, _ = engine.decode(state, NEW_TOKENS)
    return {
        "policy": case.policy,
        "settings": case.settings,
        "tokens": case.context,
        "block": engine.block,
        "tokens_read": read,
        "seconds": marks[-1]["seconds"],
        "ideal_seconds": ideal_seconds(engine, read),
        "marks": marks,
        "written": np.asarray(written)[0, : int(state.steps)].tolist(),
        "cache_bytes": cache_bytes,
        "program_bytes": program_bytes(program),
        "peak_bytes": in_use(),
        "full_cache_bytes": engine.full_cache_bytes,
    }


def ideal_seconds(engine: Engine, tokens: int) -> float:
    """What reading takes at the rates above: two operations per weight of a layer, and four per channel of a query and slot it sees."""
    config, block = engine.config, engine.block
    weights = sum(leaf.size for leaf in jax.tree.leaves(engine.weights.layers))
    slots = [min(layer.max_kept, tokens) + block / 2 for layer in engine.layers]
    attention = 4 * config.num_heads * config.head_dim * sum(slots)
    return tokens * (2 * weights / MATRICES + attention / ATTENTION)


def in_use() -> int | None:
    """The most memory that has been in use on the device; None where it does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


if __name__ == "__main__":
    main()
