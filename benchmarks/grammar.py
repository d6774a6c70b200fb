"""Measure what a row with a grammar costs the other rows of a running batch, with random weights.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.93 python -m benchmarks.grammar --policies treekv:1024,full --rows 64

While a row has a grammar, calls are one step long, and the row takes part in every second one. If most rows have grammars,
they take part in each. The grammar here allows all tokens. The time of real grammars depends on the schema, and is not
measured. Tokens per second are measured while all rows are in use. `held_tokens_s` is the rate of the rows without a grammar,
beside those with one. `free_tokens_s` is the rate if no row has a grammar, scaled to as many rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvjax._util.randomness import random_key
from kvjax.config import PRESETS
from kvjax.models import init
from kvjax.policies.text import split_policies
from kvjax.runtime.batch import Batch, Job
from kvjax.runtime.scheduler import Scheduler

WARM = 32
"""Tokens of each row before and after those that are timed."""

REPEATS = 3
"""Measurements with and without grammars, taken alternately. Results are medians."""


class Everything:
    """A grammar that allows all tokens of a vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self.bits = np.full(-(-vocabulary // 32), 0xFFFFFFFF, np.uint32)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        return self.bits


def rate(batch: Batch, prompts: Sequence[Sequence[int]], new: int, grammars: int) -> float:
    """Tokens per second of the rows without a grammar, where `grammars` others have one."""
    scheduler, vocabulary = Scheduler(batch), batch.engine.config.vocab_size
    tickets = [
        scheduler.submit(Job(prompt, new, grammar=Everything(vocabulary) if i < grammars else None))
        for i, prompt in enumerate(prompts)
    ]
    free = tickets[grammars:]
    while scheduler.waiting or len(free[-1].tokens) < WARM:
        scheduler.turn()
    before, start = sum(len(ticket.tokens) for ticket in free), time.perf_counter()
    while len(free[0].tokens) < new - WARM:
        scheduler.turn()
    found = (sum(len(ticket.tokens) for ticket in free) - before) / (time.perf_counter() - start)
    while scheduler.busy:
        scheduler.turn()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--policies", default="treekv:1024,full")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--grammars", type=int, default=1, help="rows with a grammar")
    parser.add_argument("--prompt", type=int, default=220, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--compile-jobs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.new < 4 * WARM:
        parser.error(f"--new {args.new} is too short to be timed; give {4 * WARM} or more")
    if not 0 < args.grammars < args.rows:
        parser.error(f"--grammars {args.grammars} of --rows {args.rows}; give 1 to {args.rows - 1}")
    config = PRESETS[args.shape]
    if args.layers is not None:
        config = config.with_depth(args.layers)
    out = args.out or Path(f"benchmarks/results/grammar-{report.device_slug()}.json")
    header, rows = report.begun(out, report.header(weights="random"))
    params = init(config, random_key(0), "bfloat16")
    random = np.random.default_rng(0)
    prompts = [random.integers(0, config.vocab_size - 300, args.prompt).tolist() for _ in range(args.rows)]
    for policy in map(str, split_policies(args.policies)):
        sizes = {"rows": args.rows, "prompt_len": args.prompt, "max_new_tokens": args.new}
        batch = Batch(params, policy, ends=1, masked=True, **sizes)
        batch.compile([args.prompt], args.compile_jobs)
        for grammars in (0, args.grammars):  # the first run is slower
            rate(batch, prompts, args.new, grammars)
        found = [
            (rate(batch, prompts, args.new, 0), rate(batch, prompts, args.new, args.grammars)) for _ in range(REPEATS)
        ]
        others = 1 - args.grammars / args.rows
        free, held = (statistics.median(each) for each in zip(*found, strict=True))
        row: dict[str, Any] = {"shape": args.shape, "layers": config.num_layers, "policy": policy, "rows": args.rows}
        row |= {"grammars": args.grammars, "prompt": args.prompt, "new": args.new}
        row |= {"free_tokens_s": free * others, "held_tokens_s": held, "lost": 1 - held / (free * others)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        report.write(out, header, rows)
        batch.free()


if __name__ == "__main__":
    main()
