"""Needles that KVzip finds by who shares a budget, beside all of the cache and a method that shares none.

    python -m benchmarks.analyses.kvzip_needles                # writes benchmarks/results/kvzip-needles-<device>.json, prints the table

RULER's prompts are compressed before their questions are known, to a quarter of prompt and new tokens. What is measured is kept, and a run
that was cut short goes on.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from benchmarks import report
from benchmarks.equal_bytes.suite import Data, make_suites
from kvjax.evals import Format
from kvjax.evals.report import model_fingerprint
from kvjax.policies.text import split_policies

RESULTS = Path(__file__).parents[1] / "results"
SHARED = Path(os.environ.get("KVJAX_SHARED", "shared")) / "data"
POLICIES = "full,kvzip:0.25,kvzip:0.25,scope=model,kvzip:0.25,scope=head,compactor:0.25"


def main() -> None:
    """Measure what is not there yet, write the result file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="any source that kvjax.load takes; by default the default model")
    parser.add_argument(
        "--length", type=int, default=640, help="tokens of RULER's prompts, question and answer included"
    )
    parser.add_argument("--task", default="niah_single_2", help="one of RULER's")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--text", type=Path, default=SHARED / "text/books/1661_The_Adventures_of_Sherlock_Holmes.txt")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    params = kvjax.load(args.model, dtype="float32")
    assert params.tokenizer is not None
    form = Format(params.tokenizer, params.tokenizer.chat_template is not None)
    suites = make_suites(
        [f"ruler-{args.length}"], form, params.config.context_length, args.samples, 0, Data(args.text, args.text, {})
    )
    suite = suites[0].only([args.task])
    if suite is None:
        raise SystemExit(f"--task {args.task}; give one of {', '.join(suites[0].tasks)}")
    asked = suite.asked[args.task]
    model = Path(args.model).name if args.model else "SmolLM2-135M-Instruct (the default model)"
    head = report.header(
        model=model, fingerprint=model_fingerprint(params), task=args.task, length=args.length, samples=args.samples
    )
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
    print("\n".join(table(rows)))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of the table in docs/methods/kvzip.md."""
    lines = ["| policy | needles found |", "| --- | ---: |"]
    return lines + [f"| `{row['policy']}` | {sum(row['scores']):.0f} of {len(row['scores'])} |" for row in rows]


if __name__ == "__main__":
    main()
