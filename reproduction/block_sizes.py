"""Quality loss of chunked prefill, by block size, beside whole prompts.

    python -m reproduction.block_sizes --text BOOK.txt --text OTHER.txt --length 8192 --policies snapkv,treekv --jobs 6

For each policy and block size there are two measures: perplexity of the text that follows a prompt (`reproduction.analyses.continuation`),
and scores in tasks of RULER. Tasks are asked twice: question-agnostic, where the question follows the compressed prompt, and question-aware,
where it is part of the prompt. In the second case only the question's last token is read after the prompt, so both run in the same programs.
A block of 0 is the whole prompt. Policies that do not support chunked prefill have only that row.

The samples of all tasks run as one batch, and so do as many texts. A run continues an existing result file. With `--lock FILE` several runs
compile at the same time and measure one after the other. `--merge PART...` makes one file of their results. A run compiles everything before
it measures, since tracing would slow down the measurements.
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
from kvjax.evals.intervals import mean_interval
from kvjax.evals.perplexity import compile_read
from kvjax.policies.text import split_policies
from reproduction import models
from reproduction.analyses.continuation import continuation
from reproduction.equal_bytes.batches import Roomy, answered
from reproduction.equal_bytes.suite import Data, Suite, make_suites

TASKS = "niah_single_2,niah_multikey_1,niah_multivalue,vt"
"""A needle in a text, one among others that look like it, four at once, and a chain that has to be followed."""

POLICIES = (
    "full,streaming_llm,snapkv,pyramidkv,adakv,chunkkv,expected_attention,h2o,tova,keydiff,knorm,treekv,chelsea,"
    "clusterkv,kivi,rkv"
)
"""Policies that need no profile of the model. CaM is excluded: it reads token by token whatever the block size."""


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
    """`count` passages of `size` tokens, taken from the beginnings of the texts alternately."""
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
    """An engine with the programs for the suite's tasks and for `continuation` at the same sizes."""

    def compile_all(self) -> None:
        super().compile_all()
        compile_read(self, self.reading()[1].caches)


def merge(parts: Sequence[Path], out: Path) -> None:
    """One result file of several, which must be of the same settings, versions and device; of equal rows the first counts."""
    header = report.read(parts[0])["header"]
    rows = {(row["policy"], row["block"]): row for part in reversed(parts) for row in report.begun(part, header)[1]}
    report.write(out, header, list(rows.values()))
    print(tables(list(rows.values())))


def tables(rows: Sequence[dict[str, Any]], size: int = 2048) -> str:
    """Question-agnostic and question-aware scores and perplexity, one row per policy, one column per block size, and the policies that lose.

    Args:
        rows: of a result file.
        size: block size that is compared with whole prompts.
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
                mean, half = mean_interval(100 * (whole - blocks))
                if mean > half:
                    question = "question-agnostic" if sight == "unseen" else "question-aware"
                    losses.append([f"`{policy}`", question, f"{mean:.0f} ± {half:.0f}"])
    told = f"**With blocks of {size}, no policy finds significantly less than with the whole prompt.**"
    if losses:
        told = (
            f"**With blocks of {size}, these policies find significantly less than with the whole prompt.** The loss is the mean "
            "of paired differences with its 95 % interval (t-test):\n\n"
        ) + report.table(["policy", "question", "loss, points"], losses, "llr")
    return f"{report.table(heads, lines)}\n\n{told}"


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """A row's question-agnostic and question-aware scores, in percent, and its perplexity."""
    unseen, seen = (100 * np.mean(list(row[sight].values())) for sight in ("unseen", "seen"))
    return f"{unseen:.0f}", f"{seen:.0f}", f"{np.exp(np.mean(row['nll'])):.2f}"


def scores(engine: Reading, params: kvjax.Params, suite: Suite, ahead: int) -> dict[str, list[float]]:
    """Each task's scores, with the question up to index `ahead` as part of the prompt; 0 for a prompt without it."""
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
    """A row as it is printed. Perplexity is exp of the mean over all predicted tokens of all texts."""
    means = {name: 100 * np.mean(list(row[name].values())) for name in ("unseen", "seen")}
    return (
        f"{row['policy']:20s} block {row['block'] or 'all':>5}  perplexity {np.exp(np.mean(row['nll'])):7.3f}  "
        f"question unseen {means['unseen']:5.1f}  seen {means['seen']:5.1f}  {row['seconds']:6.1f} s"
    )


if __name__ == "__main__":
    main()
