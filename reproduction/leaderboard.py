"""Every policy at the same share of bytes or of the prompt, on RULER, LongBench and GSM8K: docs/leaderboard.md.

    python -m reproduction.leaderboard --model MODEL --out part.jsonl --seconds 500     # repeat until it is done
    python -m reproduction.leaderboard --model MODEL --out part-2.jsonl --part 2/5      # a fifth of the work, on a machine of its own
    python -m reproduction.leaderboard --merge part*.jsonl        # writes reproduction/results/leaderboard-<device>.json, the page, the picture
    python -m reproduction.leaderboard --merge reproduction/results/leaderboard-h200.json part*.jsonl   # add new parts
    python -m reproduction.leaderboard --export FOLDER part*.jsonl                      # in the format of kvpress' leaderboard
    python -m reproduction.leaderboard --render                                         # the page again, from the result file

A budget means something else to each method. There are three conventions:

- `--shares`: each policy gets the largest budget at which it holds a share of the full cache's bytes, with room for question and answer.
- `--prompt-shares`: each policy keeps a share of the prompt's tokens, and all new tokens in addition (kvpress' compression ratio).
- `--read-shares`: each policy that holds all tokens lets a query read a share of the prompt's tokens.

The page lists the policies that do not run at a share. The prompt is compressed before its question is known (question-agnostic), and at
`--prompt-shares` with the question as well (question-aware). `--seeing` names the policies for which this is done with all shares.

All tasks of a suite share one compiled program for each policy and share. Except on GPUs, programs are compiled in threads while others run.
The search for budgets takes minutes on the host. `--budgets FILE` saves them; `reproduction/equal_bytes/budgets-qwen2.5-coder-1.5b.jsonl` has
those of RULER at 4k. A round asks every policy `--batch` samples of every task, so an interrupted run has asked all policies almost equally.
Each process compiles again. On a machine without a compilation cache use one round: `--batch` of all samples.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import kvjax
from kvjax.evals import Format
from kvjax.evals.report import ResultFile, header, model_fingerprint
from kvjax.policies.profile import fingerprint
from kvjax.policies.text import split_policies
from reproduction import models
from reproduction.equal_bytes import export, merged, page
from reproduction.equal_bytes.batches import Batch, Clock, Compiled, Roomy, ahead_of_turn, batches, run
from reproduction.equal_bytes.cells import Budgets, Cell, Convention, Maker, Wanted, cells, wanted
from reproduction.equal_bytes.suite import Data, Suite, make_suites

FORMS = (
    "kvzip:plus=true",
    "critical(snapkv)",
    "critical(adakv)",
    "critical(expected_attention)",
    "chunkkv(expected_attention)",
    "quantized(snapkv; bits=4)",
)
"""Forms of policies that papers name, besides the registered policies."""


def main() -> None:
    """Measure, merge, export, or render."""
    parser = models.parser(__doc__, "bfloat16")
    parser.add_argument("--suites", default="ruler-4096", help="of ruler-LENGTH, longbench-LENGTH, gsm8k-SHOTS")
    parser.add_argument("--tasks", default=None, help="only these of the suites' tasks, separated by commas")
    parser.add_argument(
        "--policies", default=",".join((*kvjax.policies.policies(trained=False), *FORMS)), help="as kvjax takes them"
    )
    parser.add_argument("--seeing", default=None, help="policies asked with the question in sight as well")
    parser.add_argument("--shares", default="0.5,0.25,0.125", help="of the full cache's bytes")
    parser.add_argument("--prompt-shares", default="0.5,0.25,0.125,0.0625,0.03125", help="of the prompt's tokens")
    parser.add_argument("--read-shares", default="0.5,0.25,0.125", help="of the prompt's tokens")
    parser.add_argument("--samples", type=int, default=20, help="of every task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=20, help="prompts that run together, and samples of a round")
    parser.add_argument(
        "--ahead", type=int, help="policies compiled at a time, while others run; by default 4, and none on GPUs"
    )
    parser.add_argument("--seconds", type=float, default=None, help="stop before so long has passed")
    parser.add_argument("--budgets", type=Path, default=None, help="file that keeps the budgets that were found")
    parser.add_argument(
        "--profiles",
        type=Path,
        default=Path(__file__).parent / "profiles",
        help="folder of profiles that policies need and kvjax does not include",
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the i-th of n parts of the policies and shares")
    parser.add_argument("--text", type=Path, default=models.BOOK)
    parser.add_argument(
        "--data", type=Path, default=models.SHARED / "tasks", help="folder of LongBench's and GSM8K's files"
    )
    parser.add_argument("--qa-1", type=Path, default=None, help="SQuAD 2's dev-v2.0.json, for RULER's qa_1")
    parser.add_argument("--qa-2", type=Path, default=None, help="HotpotQA's dev file, for RULER's qa_2")
    parser.add_argument(
        "--out", type=Path, default=Path("leaderboard.jsonl"), help="JSON lines; an existing file is continued"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="PART", help="make the result file and the page of these"
    )
    parser.add_argument("--export", type=Path, nargs="+", metavar="FOLDER PART", help="write kvpress' files of these")
    parser.add_argument("--render", action="store_true", help="write the page from the result file")
    args = parser.parse_args()
    if args.merge:
        page.write(merged.write(args.merge))
    elif args.export:
        if len(args.export) < 2:
            parser.error("--export takes a folder, and the parts to export")
        export.write(args.export[0], args.export[1:])
    elif args.render:
        page.write(merged.recorded())
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Run what is not in the file yet, within the time limit."""
    clock = Clock(args.seconds)
    params = kvjax.load(args.model, dtype=args.dtype)
    form = models.chat_format(params)
    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    data = Data(args.text, args.data, {name: path for name, path in files.items() if path is not None})
    names = args.suites.split(",")
    suites = make_suites(names, form, params.config.context_length, args.samples, args.seed, data)
    if args.tasks is not None:
        suites = [chosen for suite in suites if (chosen := suite.only(args.tasks.split(","))) is not None]
    policies, seeing = split_policies(args.policies), None if args.seeing is None else args.seeing.split(",")
    given: dict[Convention, str] = {"bytes": args.shares, "prompt": args.prompt_shares, "read": args.read_shares}
    shares: dict[Convention, list[float]] = {
        of: list(map(float, text.split(","))) for of, text in given.items() if text
    }
    planned = [entry for suite in suites for entry in wanted(suite, policies, shares, seeing)]
    make = Maker(params.config, args.profiles)
    budgets = Budgets(args.budgets, f"{fingerprint(params.config)} {params.dtype.name}", make)
    mine = cells(params, part(planned, args.part), budgets, make)
    results = ResultFile(args.out, head(args, params, form, suites))
    check_same_budgets(mine, results.rows)
    done = {sample for row in results.rows for sample in samples_of(row, len(row.get("scores", [None])))}
    unable = [
        {**cell.key, "task": None, "first": 0, "why": cell.why, "held": cell.held, "full": cell.full}
        for cell in mine
        if cell.why
    ]
    results.append([row for row in unable if not samples_of(row, 1) <= done])
    able = [cell for cell in mine if not cell.why]
    work = [each for each in batches(able, args.samples, args.batch) if not samples_of(each.key, each.count) <= done]
    print(f"{len(able)} of {len(mine)} policies at their shares; {len(work)} batches to run", flush=True)
    left = run_all(args, params, work, results, clock)
    print("done" if not left else f"{left} batches left: run it again", flush=True)


def run_all(
    args: argparse.Namespace, params: kvjax.Params, work: Sequence[Batch], results: ResultFile, clock: Clock
) -> int:
    """Run batches in order and return how many are left. Errors are printed, and the policy is skipped."""

    def made(cell: Cell) -> Roomy:
        engine = Roomy(params, cell.fitted or cell.policy, cell.suite, args.batch, cell.seen)
        engine.compile_all()
        return engine

    compiled = Compiled(list(dict.fromkeys(batch.cell for batch in work)), made, ahead_of_turn(args.ahead), clock)
    previous, failed = None, 0
    broken: set[Cell] = set()
    for i, batch in enumerate(work):
        if not clock.allows("run") or (batch.cell is not previous and not clock.allows("run", "turn")):
            compiled.close()
            return len(work) - i + failed
        if batch.cell in broken:
            failed += 1
            continue
        start = time.monotonic()
        try:
            engine = compiled.get(batch.cell)
            if batch.cell is not previous:
                clock.took("turn", time.monotonic() - start)
            previous, start = batch.cell, time.monotonic()
            row = run(params, engine, batch, args.batch)
        except Exception as error:  # of the compiler or the device; the other policies still have their turns
            broken.add(batch.cell)
            failed += 1
            print(f"{batch.cell.policy}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            continue
        clock.took("run", time.monotonic() - start)
        results.append([row])
        print(line(batch, row, time.monotonic() - start), flush=True)
    compiled.close()
    return failed


def head(args: argparse.Namespace, params: kvjax.Params, form: Format, suites: Sequence[Suite]) -> dict[str, Any]:
    """The header of the file. Runs with the same file may differ in policies, shares and samples, but not in this."""
    device = jax.devices()[0]
    return header(
        model=models.named(args.model),
        fingerprint=model_fingerprint(params),
        dtype=args.dtype,
        chat=form.chat,
        seed=args.seed,
        kind=f"{device.device_kind} ({device.platform})",
        suites={suite.name: suite.settings for suite in suites},
    )


def samples_of(row: dict[str, Any], count: int) -> set[tuple[Any, ...]]:
    """Identifiers of the first `count` samples of a row or batch."""
    of = *identity(row), row["task"]
    return {(*of, row["first"] + i) for i in range(count)}


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies the cell of a row."""
    return *(row[name] for name in ("suite", "policy", "target", "seen")), merged.of(row)


def check_same_budgets(planned: Sequence[Cell], rows: Sequence[dict[str, Any]]) -> None:
    """Refuse to continue a file in which a policy held other bytes at the same share.

    Raises:
        SystemExit: it has.
    """
    held = {identity(cell.key): cell.held for cell in planned}
    for row in rows:
        mine = held.get(identity(row))
        if mine is not None and mine != row["held"]:
            raise SystemExit(
                f"{row['policy']} would hold {mine} bytes, and held {row['held']} in the file: begin another"
            )


def part(planned: Sequence[Wanted], which: str) -> list[Wanted]:
    """The i-th of n parts; every n-th entry, so that each part has entries of every budget.

    Raises:
        SystemExit: it is not of the form I/N.
    """
    i, _, n = which.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise SystemExit(f"--part {which}; give I/N with I from 1 to N, such as 2/5")
    return list(planned)[int(i) - 1 :: int(n)]


def line(batch: Batch, row: dict[str, Any], seconds: float) -> str:
    """A batch as it is printed."""
    cell, scores = batch.cell, row["scores"]
    share = "" if cell.target is None else f"{100 * cell.target:g} %" + ("" if cell.of == "bytes" else f" {cell.of}")
    seen = "seen" if cell.seen else "unseen"
    mean = sum(scores) / len(scores)
    return (
        f"{cell.suite.name:14s} {cell.policy:20s} {share:>14s} {seen:6s} {batch.task:18s} {mean:.3f}  {seconds:6.1f} s"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads that compile for a turn that will not come would be waited for
