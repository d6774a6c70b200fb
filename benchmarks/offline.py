"""Measure lists of prompts: batches that start and stop together beside a running batch, many rows beside one, long prompts beside short ones.

    python -m benchmarks.offline schedule --model MODEL --data gsm8k/test.jsonl --problems 500 --rows 64
    python -m benchmarks.offline ruler --model MODEL --text BOOK --problems 20 --rows 20
    python -m benchmarks.offline rows --model MODEL --data gsm8k/test.jsonl --problems 200 --rows 1,64 --dtype float32
    python -m benchmarks.offline lists --shape llama-3.1-8b --policies full,treekv:0.25

`schedule` and `rows` answer problems of GSM8K without worked examples. `ruler` answers RULER's tasks at 4,096 tokens, as many examples of
each, in one list, and in batches of one task that start and stop together. They list each answer that differs, with the index of its first
differing token, and by how much the log-probabilities of the two tokens differ there. With `--dtype float32`, matmuls are in full
float32. `lists` has one prompt of 60,000 tokens and 500 of 500, with answers of 64 tokens, in one list and in two. Seconds do not
include compilation.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks import report
from kvjax import Generation
from kvjax._util.randomness import random_key
from kvjax.config import PRESETS
from kvjax.evals import Example, math_answers
from kvjax.evals.ruler import TASKS
from kvjax.evals.tasks import Inputs, make_task
from kvjax.models import Params, init
from kvjax.policies.text import split_policies
from kvjax.runtime import generation, many
from kvjax.runtime.scheduler import Schedulers
from reproduction import models

LONG, SHORT, COUNT, NEW = 60_000, 500, 500, 64
"""Tokens of the long and of a short prompt of `lists`, number of short ones, and tokens of an answer."""


class Counted(Schedulers):
    """Schedulers that remember the share of row-steps that gave a token."""

    last: "Counted | None" = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Counted.last = self


def timed(params: Params, prompts: Sequence[Any], **options: Any) -> tuple[list[Generation], float]:
    """Answers, and the seconds that they took without compilation."""
    start = time.perf_counter()
    answers = kvjax.generate(params, list(prompts), **options)
    assert isinstance(answers, list)
    return answers, time.perf_counter() - start - answers[0].stats.compile_seconds


def together(params: Params, prompts: Sequence[Any], rows: int, **options: Any) -> tuple[list[Generation], float]:
    """As `timed`, in batches of `rows` prompts that start and stop together."""
    kept, generation.runs_continuously = generation.runs_continuously, lambda run: False
    try:
        parts = [timed(params, prompts[at : at + rows], **options) for at in range(0, len(prompts), rows)]
    finally:
        generation.runs_continuously = kept
    return [answer for answers, _ in parts for answer in answers], sum(seconds for _, seconds in parts)


def running(params: Params, prompts: Sequence[Any], rows: int, **options: Any) -> tuple[list[Generation], float, float]:
    """As `timed`, through a running batch; and the share of row-steps that gave a token."""
    kept, many.Schedulers = many.Schedulers, Counted
    try:
        answers, seconds = timed(params, prompts, rows=rows, **options)
    finally:
        many.Schedulers = kept
    assert Counted.last is not None
    return answers, seconds, Counted.last.delivered / Counted.last.row_steps


def differing(ones: Sequence[Generation], others: Sequence[Generation]) -> list[dict[str, Any]]:
    """Answers with different tokens: which, from which token on, and by how much log-probabilities differ there."""
    found = []
    for i, (one, other) in enumerate(zip(ones, others, strict=True)):
        if one.tokens != other.tokens:
            pairs = zip(one.tokens, other.tokens, strict=False)
            at = next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))
            inside = at < min(len(one.tokens), len(other.tokens))
            gap = abs(one.logprobs[at] - other.logprobs[at]) if inside else None
            found.append({"problem": i, "token": at, "gap": gap})
    return found


def problems(args: argparse.Namespace, params: Params) -> tuple[Any, list[Example], list[list[int]]]:
    """The task, its examples, and their prompts as tokens."""
    task = make_task(
        "gsm8k", Inputs(shots=0, data=args.data, samples=args.problems, seed=0), params.config.context_length
    )
    form = models.chat_format(params)
    examples = list(task.examples(form))
    return task, examples, [context + question for context, question in map(form.encode, examples)]


def accuracy(task: Any, examples: Sequence[Example], answers: Sequence[Generation]) -> float:
    """Share of right answers."""
    return float(np.mean([task.score(answer.text or "", each) for answer, each in zip(answers, examples, strict=True)]))


def compared(
    args: argparse.Namespace,
    workload: str,
    running: tuple[list[Generation], float, float],
    together: tuple[list[Generation], float],
    accuracies: Sequence[float],
) -> dict[str, Any]:
    """Make and print the row that compares a running batch with batches that start and stop together.

    `accuracies` has a number for each of them.
    """
    (answers, seconds, delivered), (statics, static_seconds) = running, together
    row = {
        "workload": workload,
        "model": models.named(args.model),
        "policy": args.policies,
        "rows": int(args.rows),
        "running_s": seconds,
        "together_s": static_seconds,
        "ratio": seconds / static_seconds,
        "delivered": delivered,
        "accuracy": accuracies[0],
        "accuracy_together": accuracies[1],
        "new_tokens": sum(len(answer.tokens) for answer in answers),
    }
    found = differing(answers, statics)
    print(row, len(found), flush=True)
    return row | {"differing": found}


def schedule(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Batches that start and stop together beside a running batch of as many rows."""
    params = kvjax.load(args.model, dtype=args.dtype)
    task, examples, prompts = problems(args, params)
    options = {"policy": args.policies, "max_new_tokens": args.new_tokens}
    row: dict[str, Any] = {}
    for _ in range(2):  # the first time compiles
        ran = running(params, prompts, int(args.rows), **options)
        statics = together(params, prompts, int(args.rows), **options)
        accuracies = [accuracy(task, examples, answers) for answers in (ran[0], statics[0])]
        row = compared(args, f"gsm8k {len(prompts)}", ran, statics, accuracies)
    return [row | {"max_new_tokens": args.new_tokens}]


def ruler(args: argparse.Namespace) -> list[dict[str, Any]]:
    """RULER's tasks in batches that start and stop together beside a running batch of as many rows."""
    params = kvjax.load(args.model, dtype=args.dtype)
    form, rows = models.chat_format(params), int(args.rows)
    inputs = Inputs(text=args.text, samples=args.problems, seed=0)
    names = [name for name in TASKS if not name.startswith("qa")]  # which need files of questions
    tasks = [make_task(name, inputs, params.config.context_length) for name in names]
    asked = [(task, list(task.examples(form))) for task in tasks]
    prompts = [[context + question for context, question in map(form.encode, examples)] for _, examples in asked]
    new = [examples[0].max_new_tokens for _, examples in asked]
    each = [count for count, examples in zip(new, asked, strict=True) for _ in examples[1]]
    row: dict[str, Any] = {}
    for _ in range(2):  # the first time compiles
        ran = running(
            params, [ids for task in prompts for ids in task], rows, policy=args.policies, max_new_tokens=each
        )
        statics, static_seconds = [], 0.0
        for task, count in zip(prompts, new, strict=True):
            part, taken = together(params, task, rows, policy=args.policies, max_new_tokens=count)
            statics, static_seconds = statics + part, static_seconds + taken
        scores = [
            [accuracy(task, examples, found[at : at + len(examples)]) for found in (ran[0], statics)]
            for at, (task, examples) in zip(np.cumsum([0, *map(len, prompts[:-1])]), asked, strict=True)
        ]
        means = np.mean(scores, axis=0).tolist()
        row = compared(args, f"ruler {len(names)} x {args.problems}", ran, (statics, static_seconds), means)
    return [row]


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same problems with different numbers of rows."""
    params = kvjax.load(args.model, dtype=args.dtype)
    task, examples, prompts = problems(args, params)
    options = {"policy": args.policies, "max_new_tokens": args.new_tokens}
    found, first = [], None
    for count in map(int, args.rows.split(",")):
        answers, seconds, delivered = running(params, prompts, count, **options)
        first = answers if first is None else first
        row = {
            "workload": f"gsm8k {len(prompts)}, rows",
            "model": models.named(args.model),
            "dtype": args.dtype,
            **options,
            "rows": count,
            "running_s": seconds,
            "delivered": delivered,
            "accuracy": accuracy(task, examples, answers),
            "differing": differing(first, answers),
        }
        print(row, flush=True)
        found.append(row)
    return found


def lists(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A long prompt and many short ones, in one list and in two."""
    params = init(PRESETS[args.shape], random_key(0), args.dtype)
    random = np.random.default_rng(0)
    long, *short = (
        random.integers(0, params.config.vocab_size - 300, size).tolist()
        for size in (args.long, *[SHORT] * args.problems)
    )
    found = []
    for policy in split_policies(args.policies):
        options = {"policy": policy, "max_new_tokens": NEW, "ignore_eos": True}
        seconds = {}
        for name, prompts in (("long_s", [long]), ("short_s", short), ("both_s", [long, *short])):
            for _ in range(2):  # the first time compiles
                _, seconds[name] = timed(params, prompts, **options)
            print(policy, name, seconds[name], flush=True)
        ratio = seconds["both_s"] / (seconds["long_s"] + seconds["short_s"])
        found.append(
            {
                "workload": f"lists {args.long}, {args.problems} x {SHORT}",
                "shape": args.shape,
                **options,
                **seconds,
                "ratio": ratio,
            }
        )
    return found


def main() -> None:
    """Measure, and add the rows to the result file."""
    parser = models.parser(__doc__, "bfloat16")
    parser.add_argument("what", choices=("schedule", "ruler", "rows", "lists"))
    parser.add_argument(
        "--shape", default="llama-3.1-8b", choices=sorted(PRESETS), help="of the random weights of `lists`"
    )
    parser.add_argument("--policies", default="full", help="one policy; `lists` takes several, separated by commas")
    parser.add_argument("--data", type=Path, default=models.SHARED / "tasks/gsm8k/test.jsonl", help="problems")
    parser.add_argument("--text", type=Path, default=models.BOOK, help="text in which RULER hides needles")
    parser.add_argument(
        "--problems", type=int, default=COUNT, help="number of problems, of examples of a task, or of short prompts"
    )
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompt")
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=1024,
        help="maximum tokens of an answer to a problem, as of `kvjax eval` by default",
    )
    parser.add_argument("--rows", default="64", help="rows of a batch; `rows` takes several, separated by commas")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args()
    if args.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # also for threads that compile
    if args.what in ("schedule", "rows"):
        math_answers.check()  # before the model is loaded
    found = {"schedule": schedule, "ruler": ruler, "rows": rows, "lists": lists}[args.what](args)
    out = args.out or Path(f"benchmarks/results/offline-{report.device_slug()}.json")
    header, before = report.begun(out, report.header())
    same = {row["workload"] for row in found}
    report.write(out, header, [row for row in before if row["workload"] not in same] + found)


if __name__ == "__main__":
    main()
