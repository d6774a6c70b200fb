"""What reading a prompt in blocks costs in quality, by the size of the blocks and against the whole prompt.

    python -m reproduction.block_sizes --text BOOK.txt --text OTHER.txt --length 8192 --policies snapkv,treekv --jobs 6

For each policy and size of block: perplexity of the text that follows a prompt (`reproduction.analyses.continuation`), and scores in tasks of
RULER, asked twice: with the question out of the policy's sight, so that it comes when all of the prompt has been read, and with the
question at the end of what is read. Of that only the last token is read as new tokens are, so that both run in the same programs.
A block of 0 is the whole prompt. Policies that need it whole have that row alone.

All tasks' samples run as one batch, and as many texts. A result file that is there is gone on with. With `--lock FILE` several runs
compile beside each other, and measure one after the other; `--merge PART...` makes one file of theirs. A run compiles all it is to
measure before it measures: Python that traces programs holds up Python that runs them.
"""

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
from benchmarks import report
from kvjax.evals.perplexity import compile_read
from kvjax.policies.text import split_policies
from reproduction import models
from reproduction.analyses.continuation import continuation
from reproduction.equal_bytes.batches import Roomy, answered
from reproduction.equal_bytes.suite import Data, Suite, make_suites
from reproduction.intervals import standard_error

TASKS = "niah_single_2,niah_multikey_1,niah_multivalue,vt"
"""A needle in a text, one among others that look like it, four at once, and a chain that has to be followed."""

POLICIES = (
    "full,streaming_llm,snapkv,pyramidkv,adakv,chunkkv,expected_attention,h2o,tova,keydiff,knorm,treekv,chelsea,"
    "clusterkv,kivi,rkv"
)
"""Those that need no profile of the model, but CaM, which reads token by token whatever the size of blocks."""


def main() -> None:
    """Measure and print."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a plain text file; may be repeated")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument(
        "--tasks", default=TASKS, help="of RULER; those that hide something in a text hide it in the first"
    )
    parser.add_argument("--samples", type=int, default=8, help="of every task")
    parser.add_argument("--budget", type=float, default=0.25, help="a fraction of prompt + new tokens")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--blocks", default="512,2048,8192")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are compiled at a time")
    parser.add_argument("--lock", type=Path, help="a file that is locked while a case runs")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="PART", help="write --out from these")
    parser.add_argument("--out", type=Path, default=Path("reproduction/results/block-sizes.json"))
    args = parser.parse_args()
    if args.merge:
        return merge(args.merge, args.out)
    if not args.text:
        parser.error("give at least one --text")
    params = kvjax.load(args.model, dtype=args.dtype)
    suite = make_suite(params, args)
    batch = sum(len(asked.examples) for asked in suite.asked.values())
    texts = passages(params, args.text, batch, suite.prompt + suite.new(seen=False))
    header, rows = report.begun(
        args.out,
        report.header(
            model=models.named(args.model),
            texts=[path.name for path in args.text],
            tasks=args.tasks.split(","),
            prompt_tokens=suite.prompt,
            scored_tokens=suite.new(seen=False) - 1,
            samples=args.samples,
            passages=batch,
            budget=args.budget,
            dtype=args.dtype,
        ),
    )
    sizes = [0, *(int(size) for size in args.blocks.split(","))]
    there = [(row["policy"], row["block"]) for row in rows]
    cases = [(text, size) for text in split_policies(args.policies) for size in sizes if (text, size) not in there]

    if not cases:
        return print(tables(rows))

    def compiled(case: tuple[str, int]) -> Reading | str:
        text, size = case
        try:
            policy = kvjax.get_policy(kvjax.get_policy(text), budget=args.budget)
            engine = Reading(params, policy, suite, batch, block=size or None)
            engine.compile_all()
        except (kvjax.PolicyError, jax.errors.JaxRuntimeError) as error:  # the others are to run
            return " ".join(str(error).split())[:300]
        return engine

    with ThreadPoolExecutor(args.jobs) as pool:
        engines = list(tqdm(pool.map(compiled, cases), total=len(cases), unit="case", desc="compiled"))
    for (text, size), engine in zip(tqdm(cases, unit="case", desc="measured"), engines, strict=True):
        if isinstance(engine, str):
            tqdm.write(f"{text}, block {size}: {engine}")
            continue
        with report.alone(args.lock):
            start = time.monotonic()
            try:
                found = row(params, engine, suite, texts)
            except jax.errors.JaxRuntimeError as error:
                tqdm.write(f"{text}, block {size}: {' '.join(str(error).split())[:300]}")
                continue
        rows.append({"policy": text, **found, "seconds": round(time.monotonic() - start, 2)})
        tqdm.write(line(rows[-1]))
        report.write(args.out, header, rows)
    print(tables(rows))


def make_suite(params: kvjax.Params, args: argparse.Namespace) -> Suite:
    """The tasks, with prompts of one length."""
    data = Data(args.text[0], Path(os.devnull), {})
    (suite,) = make_suites(
        [f"ruler-{args.length}"], models.chat_format(params), params.config.context_length, args.samples, 0, data
    )
    chosen = suite.only(args.tasks.split(","))
    if chosen is None or len(chosen.tasks) < len(args.tasks.split(",")):
        raise SystemExit(f"--tasks {args.tasks}; there are {', '.join(suite.tasks)}")
    return chosen


def passages(params: kvjax.Params, paths: Sequence[Path], count: int, size: int) -> list[list[int]]:
    """So many passages of `size` tokens, sharded from the texts in turn, from their beginnings on."""
    assert params.tokenizer is not None
    tokens = [params.tokenizer.encode(path.read_text(encoding="utf-8")) for path in paths]
    found = [tokens[i % len(paths)][i // len(paths) * size :][:size] for i in range(count)]
    if min(map(len, found)) < size:
        raise SystemExit(
            f"the texts have no {count} passages of {size} tokens; give more of --text, or fewer --samples"
        )
    return found


def row(params: kvjax.Params, engine: "Reading", suite: Suite, texts: list[list[int]]) -> dict[str, Any]:
    """A row of the result file: log-probabilities and scores, for each sample its own."""
    found = continuation(params, texts, suite.prompt, engine.policy, prefill_block=engine.block or None)
    return {
        "block": engine.block,
        "nll": [text.scores.nll for text in found],
        "unseen": scores(engine, params, suite, ahead=0),
        "seen": scores(engine, params, suite, ahead=-1),
        "cache_bytes": found[0].scores.cache_bytes,
        "full_cache_bytes": engine.full_cache_bytes // engine.batch,
    }


class Reading(Roomy):
    """What answers the suite's tasks, and what `continuation` runs with texts of its sizes."""

    def compile_all(self) -> None:
        super().compile_all()
        compile_read(self, self.reading()[1].caches)


def merge(parts: Sequence[Path], out: Path) -> None:
    """One result file of several, which must be of the same settings, versions and device; of equal rows the first counts."""
    header = report.read(parts[0])["header"]
    rows = {(row["policy"], row["block"]): row for part in reversed(parts) for row in report.begun(part, header)[1]}
    report.write(out, header, list(rows.values()))
    print(tables(list(rows.values())))


def tables(rows: Sequence[dict[str, Any]], size: int = 2048, points: float = 2.0) -> str:
    """Scores with the question unseen and seen and perplexity, one row per policy, one column per size of block; and who loses by them.

    Args:
        size: of the blocks that are set against whole prompts.
        points: losses up to so many, of a hundred, are not named.
    """
    measured = {(row["policy"], row["block"]): row for row in rows}
    sizes = sorted({block for _, block in measured})
    policies = [text for text in split_policies(POLICIES) if (text, 0) in measured]
    policies += [policy for policy in dict.fromkeys(policy for policy, _ in measured) if policy not in policies]
    heads = ["policy", *(f"{block}" if block else "whole prompt" for block in sizes)]
    lines, losses = [], []
    for policy in policies:
        found = [", ".join(cells(measured[policy, block])) if (policy, block) in measured else "" for block in sizes]
        lines.append([f"`{policy}`", *found])
        if {(policy, 0), (policy, size)} <= set(measured):
            for sight in ("unseen", "seen"):
                whole, blocks = (np.ravel(list(measured[policy, block][sight].values())) for block in (0, size))
                lost = 100 * (whole - blocks)
                if lost.mean() > points:
                    losses.append(f"`{policy}`, {sight} ({lost.mean():.0f} ± {standard_error(lost):.0f})")
    told = "; ".join(losses) if losses else "none"
    return (
        report.table(heads, lines)
        + f"\n\nBlocks of {size} lose more than {points:g} points to the whole prompt (mean of the paired differences ± its standard "
        f"error) with: {told}."
    )


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """What a row found with the question unseen and seen, in percent, and its perplexity."""
    unseen, seen = (100 * np.mean(list(row[sight].values())) for sight in ("unseen", "seen"))
    return f"{unseen:.0f}", f"{seen:.0f}", f"{np.exp(np.mean(row['nll'])):.2f}"


def scores(engine: Reading, params: kvjax.Params, suite: Suite, ahead: int) -> dict[str, list[float]]:
    """Each task's scores, where of a question all but the last `-ahead` tokens, or none for 0, are read with the prompt."""
    assert params.tokenizer is not None
    asked = [
        (task, example, pair)
        for task in suite.asked.values()
        for example, pair in zip(task.examples, task.pairs, strict=True)
    ]
    prompts = [context + (question[:ahead] if ahead else []) for _, _, (context, question) in asked]
    questions = [question[ahead:] if ahead else question for _, _, (_, question) in asked]
    most = max(example.max_new_tokens for _, example, _ in asked)
    answers = answered(params, engine, prompts, questions, most)
    found: dict[str, list[float]] = {name: [] for name in suite.asked}
    names = [name for name, task in suite.asked.items() for _ in task.examples]
    for name, (task, example, pair), answer in zip(names, asked, answers, strict=True):
        text = params.tokenizer.decode_after(pair[0] + pair[1], answer.tokens[: example.max_new_tokens])
        found[name].append(round(task.task.score(text, example), 6))
    return found


def line(row: dict[str, Any]) -> str:
    """What is printed of a row. Perplexity is exp of the mean over all predicted tokens of all texts."""
    means = {name: 100 * np.mean(list(row[name].values())) for name in ("unseen", "seen")}
    return (
        f"{row['policy']:20s} block {row['block'] or 'all':>5}  perplexity {np.exp(np.mean(row['nll'])):7.3f}  "
        f"question unseen {means['unseen']:5.1f}  seen {means['seen']:5.1f}  {row['seconds']:6.1f} s"
    )


if __name__ == "__main__":
    main()
