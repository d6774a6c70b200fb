"""A text of which the device could not hold the whole cache, read piece by piece with compression between the pieces.

    python -m benchmarks.long_context --policies chelsea:16384 --tokens 1000000
    python -m benchmarks.long_context --policies treekv:4096 --tokens 10000000 --seconds 600

Random weights read random tokens. A row has how many were read in what time, bytes of the cache and of the program that reads a piece,
which is all the memory that this takes, and bytes that the full cache would have. What `--seconds` cuts short says how far it came.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks import report
from kvjax.bench.case import Case, read_policy
from kvjax.models import Params, init
from kvjax.policies.text import split_policies
from kvjax.runtime import decoding
from kvjax.runtime.engine import Engine, program_bytes

MARKS = 10
"""Points on the way of which the time is noted."""


def main() -> None:
    """Read with one policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", default="chelsea:16384", help="as for `kvjax bench`")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--piece", type=int, default=4096, help="tokens that are read at a time")
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
        rows.append(measure(case, params, args.piece, args.seconds))
        print("{policy}: {tokens_read} tokens in {seconds:.0f} s, cache {cache_bytes} B".format(**rows[-1]), flush=True)
        report.write(out, header, rows)


def measure(case: Case, params: Params, piece: int, seconds: float) -> dict[str, Any]:
    """Read `case.context` tokens, less what is no whole piece, or as many as there is time for."""
    engine, pieces = (
        Engine(params, case.bound_policy(), prompt_len=0, max_new_tokens=case.context),
        case.context // piece,
    )
    state = engine.begin()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.caches))
    shape = jax.ShapeDtypeStruct((1, piece), jnp.int32)
    program = decoding.extend.compiled(engine.policy, engine.specs, engine.weights, state, shape)
    start, marks = time.perf_counter(), []
    for i in tqdm(range(pieces), unit="piece", desc=case.policy):
        key = jax.random.fold_in(jax.random.key(1), i)
        tokens = jax.random.randint(key, (1, piece), 0, params.config.vocab_size, jnp.int32)
        state = jax.block_until_ready(engine.extend(state, tokens))
        taken = time.perf_counter() - start
        if (i + 1) * MARKS // pieces > i * MARKS // pieces or taken > seconds:
            marks.append({"tokens": (i + 1) * piece, "seconds": taken})
        if taken > seconds:
            break
    return {
        "policy": case.policy,
        "settings": case.settings,
        "tokens": case.context,
        "piece": piece,
        "tokens_read": int(state.pos[0]),
        "seconds": marks[-1]["seconds"],
        "marks": marks,
        "cache_bytes": cache_bytes,
        "program_bytes": program_bytes(program),
        "full_cache_bytes": engine.full_cache_bytes,
    }


if __name__ == "__main__":
    main()
