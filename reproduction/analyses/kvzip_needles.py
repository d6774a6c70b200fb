"""Needles that KVzip finds, by the heads that share a budget, beside the full cache and a method without shared budgets.

    python -m reproduction.analyses.kvzip_needles                # writes reproduction/results/kvzip-needles-<device>.json, prints the table

RULER's prompts are compressed before their questions are known, to a quarter of prompt and new tokens. An interrupted run continues.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from kvjax.evals.report import model_fingerprint
from kvjax.policies.text import split_policies
from reproduction import models
from reproduction.equal_bytes.suite import Data, make_suites
from reproduction.sections import RESULTS

POLICIES = "full,kvzip:0.25,kvzip:0.25,slack=1.25,kvzip:0.25,prefix=0,slack=2,kvzip:0.25,scope=layer,prefix=0,kvzip:0.25,scope=head,prefix=0,compactor:0.25"


def main() -> None:
    """Measure what is missing, write the result file, and print the table."""
    parser = models.parser(__doc__, "float32")
    parser.add_argument(
        "--length", type=int, default=640, help="tokens of RULER's prompts, question and answer included"
    )
    parser.add_argument("--task", default="niah_single_2", help="one of RULER's")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--text", type=Path, default=models.BOOK)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    params = kvjax.load(args.model, dtype=args.dtype)
    form, data = models.chat_format(params), Data(args.text, args.text, {})
    (whole,) = make_suites([f"ruler-{args.length}"], form, params.config.context_length, args.samples, 0, data)
    suite = whole.only([args.task])
    if suite is None:
        raise SystemExit(f"--task {args.task}; give one of {', '.join(whole.tasks)}")
    asked = suite.asked[args.task]
    about = {name: getattr(args, name) for name in ("task", "length", "samples")}
    head = report.header(model=models.named(args.model), fingerprint=model_fingerprint(params), **about)
    path = args.out or RESULTS / f"kvzip-needles-{report.device_slug()}.json"
    head, rows = report.begun(path, head)
    done = {row["policy"] for row in rows}
    for text in split_policies(args.policies):
        policy = kvjax.get_policy(text)
        if str(policy) in done:
            continue
        answers = kvjax.generate(
            params,
            [context for context, _ in asked.pairs],
            policy,
            max_new_tokens=32,  # a number of seven digits, whose sentence is begun for the model
            question=[question for _, question in asked.pairs],
        )
        scores = [
            asked.task.score(params.tokenizer.decode_after([], answer.tokens), example)
            for answer, example in zip(answers, asked.examples, strict=True)
        ]
        tokens = [len(context) for context, _ in asked.pairs]
        rows.append({"policy": str(policy), "scores": scores, "tokens": tokens})
        report.write(path, head, rows)
        print(rows[-1], flush=True)
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table in docs/methods/kvzip.md."""
    lines = [[f"`{row['policy']}`", f"{sum(row['scores']):.0f} of {len(row['scores'])}"] for row in rows]
    return report.table(["policy", "needles found"], lines)


if __name__ == "__main__":
    main()
