"""Quality loss of each policy at several budgets, beside the full cache.

    python -m reproduction.policy_quality --text BOOK.txt --text OTHER.txt

The beginning of every text is prefilled under a policy, and the rest is read token by token through the compressed cache
(`reproduction.analyses.continuation`). The measures are perplexity of the rest, and how often the top-1 token is the full cache's. Budgets are
fractions of the whole text. They limit different things: policies that compress only the prompt keep the rest in addition, and sparse
policies keep everything. So the table also gives the bytes held.
"""

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from benchmarks import report
from kvjax.policies.text import split_policies
from reproduction import models, tables
from reproduction.analyses.continuation import Continuation, continuation


def main() -> None:
    """Measure and print."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--text", type=Path, action="append", required=True, help="a plain text file; may be repeated")
    parser.add_argument("--prompt", type=int, default=7168, help="tokens of each text that are prefilled")
    parser.add_argument("--scored", type=int, default=1024, help="tokens read after them")
    parser.add_argument("--skip", type=int, default=0, help="tokens to leave out at the start of each text")
    parser.add_argument("--budgets", default="0.125,0.25,0.5,1.0", help="fractions of prompt + scored tokens")
    parser.add_argument("--policies", default=",".join(kvjax.policies.policies(trained=False)))
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="policies measured at a time, each in a process of its own; on a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false",
    )
    parser.add_argument("--out", type=Path, default=Path("reproduction/results/policy-quality.json"))
    args = parser.parse_args()

    prepare(args)
    total = args.prompt + args.scored
    policies = chosen(split_policies(args.policies), [float(budget) for budget in args.budgets.split(",")])
    for policy in policies:  # fails early if a policy cannot work
        policy.bind(SHARED["params"].config).validate(total)
    header = report.header(
        model=models.named(args.model),
        texts=[path.name for path in args.text],
        prompt_tokens=args.prompt,
        scored_tokens=args.scored,
        skipped_tokens=args.skip,
        dtype=args.dtype,
    )
    rows: list[dict[str, Any]] = []
    full = measure(kvjax.Full())
    for measured in itertools.chain([full], all_of(policies, args)):
        rows.append(row(measured, full, args.text))
        report.write(args.out, header, rows)
        print(line(rows[-1]), flush=True)
    print(tables.quality(rows))


SHARED: dict[str, Any] = {}
"""The model, the texts' tokens and the length of their prompts, in every process."""


def prepare(args: argparse.Namespace) -> None:
    """Load what each process needs."""
    SHARED["params"] = params = kvjax.load(args.model, dtype=args.dtype)
    SHARED["texts"] = [models.read_tokens(params, path, args.prompt + args.scored, args.skip) for path in args.text]
    SHARED["prompt"] = args.prompt


def chosen(names: list[str], budgets: list[float]) -> list[kvjax.Policy]:
    """Each policy at each budget; those that save bits, not tokens, at each number of bits."""
    found = []
    for name in names:
        fields = {field.name for field in dataclasses.fields(kvjax.get_policy(name))}
        if "budget" in fields:
            found += [kvjax.get_policy(name, budget=budget) for budget in budgets]
        elif "bits" in fields:
            found += [kvjax.get_policy(name, bits=bits) for bits in (2, 4, 8)]
    return found


def all_of(policies: list[kvjax.Policy], args: argparse.Namespace) -> Iterator["Measured"]:
    """Each policy's measurement, in order, as many at a time as asked for."""
    if args.jobs == 1:
        yield from map(measure, policies)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawn, initializer=prepare, initargs=(args,)) as pool:
        yield from pool.map(measure, policies)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One policy's predictions of all texts, and the time they took, compilation included."""

    policy: kvjax.Policy
    texts: list[Continuation]
    seconds: float


def measure(policy: kvjax.Policy) -> Measured:
    """Read all texts, as one batch, under one policy."""
    start = time.perf_counter()
    texts = continuation(SHARED["params"], SHARED["texts"], SHARED["prompt"], policy)
    return Measured(policy, texts, time.perf_counter() - start)


def row(measured: Measured, full: Measured, paths: list[Path]) -> dict[str, Any]:
    """A row of the result file: over all texts, and each apart. Perplexity is exp of the mean over all predicted tokens."""
    return {
        "policy": name(measured.policy),
        "budget": getattr(measured.policy, "budget", None),
        "perplexity": perplexity(measured.texts),
        "agreement": agreement(measured.texts, full.texts),
        "cache_bytes": measured.texts[0].scores.cache_bytes,
        "seconds": measured.seconds,
        "texts": {
            path.stem: {"perplexity": text.scores.perplexity, "agreement": text.agreement(other)}
            for path, text, other in zip(paths, measured.texts, full.texts, strict=True)
        },
    }


def name(policy: kvjax.Policy) -> str:
    """What the table calls a policy."""
    bits = getattr(policy, "bits", None)
    return str(policy.info.name) if bits is None else f"{policy.info.name}, {bits} bits"


def perplexity(texts: list[Continuation]) -> float:
    """exp of the mean negative log-likelihood over the predicted tokens of all texts."""
    return math.exp(-np.mean(np.concatenate([text.scores.logprobs for text in texts]), dtype=np.float64))


def agreement(texts: list[Continuation], full: list[Continuation]) -> float:
    """Share of all places where the top-1 token is the full cache's."""
    return float(np.mean([text.agreement(other) for text, other in zip(texts, full, strict=True)]))


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    budget = "" if row["budget"] is None else f"{100 * row['budget']:.1f} %"
    return (
        f"{row['policy']:16s} {budget:>8s}   perplexity {row['perplexity']:8.3f}   agreement {100 * row['agreement']:6.2f} %"
        f"   cache {row['cache_bytes'] / 1e6:7.1f} MB   {row['seconds']:6.1f} s"
    )


if __name__ == "__main__":
    main()
