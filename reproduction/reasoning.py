"""Quality loss of policies while a model reasons: GSM8K without solved examples, where generated tokens fill the cache.

    python -m reproduction.make_profiles --model MODEL --methods triattention --out PROFILES
    python -m reproduction.reasoning --model MODEL --data GSM8K.jsonl --profiles PROFILES --out part.jsonl   # continues
    python -m reproduction.reasoning --record part.jsonl     # writes reproduction/results/reasoning-<device>.json and docs/quality.md

Every policy has the same budget, in slots of each head, for the problem and the generated tokens. All answer the same problems with greedy
decoding. A round asks every policy one batch of problems. On GPUs each policy is compiled in its turn, elsewhere in threads while others run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from benchmarks import report
from kvjax import Engine
from kvjax.cache import bucket
from kvjax.evals import GSM8K, Example, Format
from kvjax.evals.intervals import standard_error
from kvjax.evals.report import ResultFile, header, model_fingerprint, read_rows
from kvjax.policies.text import split_policies
from reproduction import models, sections
from reproduction.equal_bytes.batches import Clock, Compiled, ahead_of_turn, answered
from reproduction.make_profiles import path as profile_path
from reproduction.sections import Section, device

POLICIES = "full,rkv,triattention,recompress(snapkv; every=128),h2o,treekv,streaming_llm"
"""Policies for models that reason, and policies that evict with every token."""


UNMENDED = """
These answers were scored before a fix of the scorer, and were not kept. Then the number of a heading such as `#### 1.` counted instead of a
box behind it, as did the last number of a box, such as the exponent of a unit. Right answers of this kind are counted as wrong.
"""
"""What the section says of a result file without answers."""


def main() -> None:
    """Measure, or make the result file and the page's section."""
    parser = models.parser(__doc__, "bfloat16")
    parser.add_argument("--data", type=Path, default=models.SHARED / "tasks/gsm8k/test.jsonl", help="GSM8K's problems")
    parser.add_argument("--policies", default=POLICIES, help="as kvjax takes them, without budgets")
    parser.add_argument("--profiles", type=Path, help="folder of profiles that kvjax does not include")
    parser.add_argument("--budget", type=int, default=256, help="slots of each head")
    parser.add_argument("--new-tokens", type=int, default=1024, help="of an answer at most")
    parser.add_argument("--samples", type=int, default=256, help="problems, from the file's beginning")
    parser.add_argument("--batch", type=int, default=128, help="problems that run together")
    parser.add_argument(
        "--ahead", type=int, help="policies compiled at a time, while others run; by default 4, and none on GPUs"
    )
    parser.add_argument("--seconds", type=float, default=None, help="stop before so long has passed")
    parser.add_argument(
        "--out", type=Path, default=Path("reasoning.jsonl"), help="JSON lines; an existing file is continued"
    )
    parser.add_argument("--record", type=Path, metavar="PART", help="make the result file and the section of this one")
    parser.add_argument("--render", action="store_true", help="write the page's section from the result file")
    parser.add_argument("--rescore", type=Path, metavar="RESULTS", help="score the answers of this result file again")
    args = parser.parse_args()
    if args.record:
        record(args.record)
        SECTION.write()
    elif args.rescore:
        rescore(args.rescore, args.data)
        SECTION.write()
    elif args.render:
        SECTION.write()
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Answer what has no answer yet, within the time limit. Errors are printed, and the batch is skipped."""
    clock = Clock(args.seconds)
    params = kvjax.load(args.model, dtype=args.dtype)
    task = GSM8K(str(args.data), None, shots=0, samples=args.samples, max_new_tokens=args.new_tokens)
    form = models.chat_format(params)
    examples = task.examples(form)
    prompts = [[*context, *question] for context, question in map(form.encode, examples)]
    settings = {name: getattr(args, name) for name in ("dtype", "budget", "new_tokens", "batch")}
    about = {
        "model": models.named(args.model),
        "fingerprint": model_fingerprint(params),
        "chat": form.chat,
        "data": args.data.name,
    }
    results = ResultFile(args.out, header(**about, **settings))
    done = {(row["policy"], row["first"]) for row in results.rows}
    names = split_policies(args.policies)
    work = [
        (name, first) for first in range(0, len(prompts), args.batch) for name in names if (name, first) not in done
    ]
    size = bucket(max(map(len, prompts)))

    def made(name: str) -> Engine:
        policy = policy_of(name, args.budget, args.profiles, params)
        engine = Engine(params, policy, batch=args.batch, prompt_len=size, max_new_tokens=args.new_tokens)
        engine.compile()
        return engine

    compiled = Compiled(list(dict.fromkeys(name for name, _ in work)), made, ahead_of_turn(args.ahead), clock)

    def in_turn(name: str) -> Engine | None:
        """The engine; None if there is no time to compile it or to run a batch."""
        if not (name in compiled or clock.allows("compile", "run")):
            return None
        engine = compiled.get(name)
        return engine if clock.allows("run") else None

    left = 0
    for i, (name, first) in enumerate(work):
        chosen = slice(first, first + args.batch)
        try:
            engine, start = in_turn(name), time.monotonic()
            if engine is None:
                left += len(work) - i
                break
            row = scored(params, engine, task, form, prompts[chosen], examples[chosen], args.new_tokens)
        except Exception as error:  # of one policy; the others still have their turns
            left += 1
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            continue
        clock.took("run", time.monotonic() - start)
        results.append([{"policy": name, "first": first, **row}])
        right, seconds = 100 * np.mean(row["scores"]), time.monotonic() - start
        print(f"{name:32s} {right:5.1f} % of {len(row['scores'])} right, {seconds:.1f} s", flush=True)
    compiled.close()
    print("done" if not left else f"{left} batches left: run it again", flush=True)


def policy_of(name: str, budget: int, profiles: Path | None, params: kvjax.Params) -> kvjax.Policy:
    """The policy with its budget, and with the profile that the folder has for it."""
    policy = kvjax.get_policy(kvjax.get_policy(name), budget=budget)
    if profiles is None or not hasattr(policy, "profile"):
        return policy
    file = profile_path(profiles, policy.info.name, params.config)
    return kvjax.get_policy(policy, profile=str(file)) if file.exists() else policy


def scored(
    params: kvjax.Params,
    engine: Engine,
    task: GSM8K,
    form: Format,
    prompts: Sequence[list[int]],
    examples: Sequence[Example],
    new_tokens: int,
) -> dict[str, Any]:
    """Answers to one batch, scored."""
    answers = answered(params, engine, prompts, None, new_tokens)
    texts = [form.opening(example) + (each.text or "") for each, example in zip(answers, examples, strict=False)]
    return {
        "held": (engine.cache_bytes + engine.host_cache_bytes) // engine.batch,
        "full": engine.full_cache_bytes // engine.batch,
        "scores": [task.score(text, example) for text, example in zip(texts, examples, strict=True)],
        "new_tokens": [len(each.tokens) for each in answers],
        "ended": [each.stop_reason == "eos" for each in answers],
        "decode_seconds": round(answers[0].stats.decode_seconds, 3),
        "answers": texts,
    }


def record(part: Path) -> Path:
    """Make the result file: a score for each problem, with the answers, so that `--rescore` can score them again."""
    with part.open(encoding="utf-8") as file:
        begun = json.loads(file.readline())["header"]
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(read_rows(part), key=lambda row: row["first"]):
        entry = found.setdefault(row["policy"], {name: row[name] for name in ("policy", "held", "full")})
        if row["first"] == len(
            entry.get("scores", [])
        ):  # without a gap, so that scores of policies are of the same problems
            for name in ("scores", "new_tokens", "ended", "answers"):
                entry.setdefault(name, []).extend(row[name])
    out = sections.RESULTS / f"reasoning-{sections.slug(begun)}.json"
    report.write(out, begun, [row for row in found.values() if "scores" in row])
    return out


def rescore(file: Path, data: Path) -> None:
    """Score the answers of a result file again.

    Raises:
        SystemExit: the file has no answers.
    """
    content = report.read(file)
    task = GSM8K(str(data), None, shots=0)
    examples = task.examples(Format(tokenizer=None, chat=True))  # pyright: ignore[reportArgumentType]
    for row in content["rows"]:
        if "answers" not in row:
            raise SystemExit(f"{file} has no answers of {row['policy']}; measure again")
        row["scores"] = [task.score(text, each) for text, each in zip(row["answers"], examples, strict=False)]
    report.write(file, content["header"], content["rows"])


def section(content: Mapping[str, Any]) -> str:
    """What the page has of a result file."""
    about, rows = content["header"]["settings"], content["rows"]
    counts = sorted({len(row["scores"]) for row in rows})
    return f"""\
{conclusion(rows)}GSM8K, {" to ".join(map(str, counts))} problems, zero-shot with step-by-step reasoning in up to {about["new_tokens"]} tokens (`python -m reproduction.reasoning`). {models.title(about)} in {about["dtype"]} on one {device(content["header"])}.
Every policy has {about["budget"]} slots per head for problem and answer. Some hold more between compressions, so compare the bytes too. Means and standard errors in percent. Differences from the full cache are paired over
problems that both have answered. *Ended*: answers that ended by themselves.
{"" if all("answers" in row for row in rows) else UNMENDED}
{table(rows)}"""


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Policies that lose nothing significant against the full cache, by two standard errors, and those that lose something."""
    full = next((row for row in rows if row["policy"] == "full"), None)
    if full is None:
        return ""
    kept, lost = [], []
    for row in rows:
        count = min(len(row["scores"]), len(full["scores"]))
        change = 100 * np.subtract(row["scores"][:count], full["scores"][:count], dtype=float)
        if row is not full and len(change) > 1:
            (lost if np.mean(change) < -2 * standard_error(change) else kept).append((row, -np.mean(change)))
    told = []
    for found, says in ((kept, "lose nothing significant"), (lost, "lose {} points")):
        if found:
            names = [f"`{row['policy']}`" for row, _ in found]
            points = says.format(_range([points for _, points in found]))
            held = _range([100 * row["held"] / row["full"] for row, _ in found])
            told.append(f"{_listed(names)} {points} with {held} % of the bytes.")
    return f"**{' '.join(told)}** " if told else ""


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row per policy, the best first after the full cache."""
    full = next((row for row in rows if row["policy"] == "full"), None)
    lines = []
    for row in sorted(rows, key=lambda row: (row["policy"] != "full", -np.mean(row["scores"]))):
        apart = ""
        if full is not None and row is not full:
            count = min(len(row["scores"]), len(full["scores"]))
            apart = _mean(np.subtract(row["scores"][:count], full["scores"][:count]), "+")
        cells = [
            f"`{row['policy']}`",
            _mean(row["scores"]),
            apart,
            f"{100 * np.mean(row['ended']):.0f} %",
            f"{np.mean(row['new_tokens']):.0f}",
            f"{100 * row['held'] / row['full']:.1f} %",
        ]
        lines.append(cells)
    heads = ["policy", "right", "beside the full cache", "ended", "tokens written", "held, of the full cache"]
    return report.table(heads, lines)


def _mean(scores: Any, sign: str = "") -> str:
    """In percent, with its standard error."""
    scores = 100 * np.asarray(scores, float)
    error = f" ± {standard_error(scores):.1f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):{sign}.1f}{error}"


SECTION = Section("quality.md", "While a model reasons", "reasoning", section)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads that compile for a turn that will not come would be waited for
