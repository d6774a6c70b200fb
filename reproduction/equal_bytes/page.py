"""Make docs/leaderboard.md and its picture from the result file."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvjax import plots
from kvjax.evals.intervals import means_interval
from kvjax.evals.report import write as write_file
from kvjax.policies import get_policy, policies
from reproduction import models
from reproduction.sections import DOCS

from . import merged
from .cells import MEMORIES, WHOLE_HEADS, Convention

PICTURE = "leaderboard.png"

QUOTES = '""'
"""An empty argument in a shell."""

FEW = 20
"""With fewer samples of a task the page says that the results mean nothing."""

LEAST_MEASURED = 2 / 3
"""A column is shown once this share of its policies has been measured. Before, its best one would mean little."""

Column = tuple[float, bool]
"""A share, and whether policies saw the question."""

CONVENTIONS: dict[Convention, tuple[str, str]] = {
    "bytes": (
        "equal bytes",
        "Each policy gets the largest fractional budget at which its caches take no more than a share of the full cache's bytes. Bytes are\n"
        "those on device and host together, for all prompts of a suite. Room for the suite's longest question and answer is included. Slots are rounded, so\n"
        "up to 2 % more counts as equal. Use this table to choose for a memory limit.",
    ),
    "prompt": (
        "equal shares of the prompt",
        "Each policy keeps a share of the prompt's tokens, and all new tokens in addition. This is kvpress' convention, whose compression\n"
        "ratio is one minus the share. Policies that also evict new tokens run as `prompt_only(...)`. A policy that needs up to\n"
        f"{100 * (WHOLE_HEADS - 1):.0f} % more than the share is included.",
    ),
    "read": (
        "equal shares read",
        "These policies hold all tokens. A query reads a share of the prompt's tokens, or less: `infinigen` reads only tokens whose predicted\n"
        "score is near the highest (`alpha`).",
    ),
}
"""Title and explanation of each convention."""

INTRODUCTION = """\
# Leaderboard

This page compares policies at equal cost, because the same budget means different things to different methods. Other hyperparameters have
their defaults, unless the policy's name gives them. Policies without a budget, such as `kivi`, get as many bits as the share allows.

{conventions}

*Question-agnostic*: the prompt is compressed before the question is known, as for many questions about one context.{seen}

Cells are means over tasks in percent, with standard errors. All policies answer the same prompts. **Bold**: no other policy of the column is
significantly better (paired t-test, 95 %). A column has no bold cells if the full cache is not significantly better than `streaming_llm`.
With this many comparisons, expect about 1 in 40 false positives.
"""

SEEN = """ *Question-aware*: the
question is part of the prompt, as in the papers of most policies that score tokens by queries."""
"""What the introduction has besides, where a table has such a column."""


def about_ruler(header: Mapping[str, Any]) -> list[str]:
    """How RULER's tasks differ from the official ones; empty for results without them."""
    suites = {name: each["tasks"] for name, each in header["settings"]["suites"].items() if name.startswith("ruler-")}
    if not suites:
        return []
    given = [task for tasks in suites.values() for task in tasks.values()]
    texts = dict.fromkeys(each["text"] for each in given if "text" in each)
    told = (
        f"RULER's haystack is {', '.join(f'`{text}`' for text in texts)}, not Paul Graham's essays, and prompts fill their length, so scores "
        "are\nnot comparable with those of other leaderboards. See "
        "[how kvjax's tasks differ from the official ones](howto/evaluation.md#differences-from-the-official-code)."
    )
    return [told + "\n"]


def write(path: Path) -> None:
    """Write page and picture."""
    content = report.read(path)
    write_file(DOCS / "leaderboard.md", render(content, path.name))
    plots.save(plots.tradeoff(points(content["rows"])), DOCS / PICTURE)
    print(f"wrote {DOCS / 'leaderboard.md'} and {DOCS / PICTURE} from {path}")


def render(content: Mapping[str, Any], file: str) -> str:
    """The page, of a result file's content."""
    header, every = content["header"], content["rows"]
    suites = {
        suite: [row for row in every if row["suite"] == suite] for suite in dict.fromkeys(row["suite"] for row in every)
    }
    rows = [row for suite in suites.values() for row in merged.first_samples(suite)]
    settings, versions = header["settings"], header["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    counts = sorted({int(np.sum(~np.isnan(merged.samples(row)))) for row in rows if "scores" in row})
    most = max(len(row["scores"]) for row in every if "scores" in row)
    more = f", and {most} for some policies" if most > counts[-1] else ""
    parts = [
        INTRODUCTION.format(
            seen=SEEN if any(row["seen"] for row in rows if "scores" in row) else "",
            conventions="\n\n".join(
                f"**{title.capitalize()}.** {told}" for title, told in (CONVENTIONS[of] for of in conventions(rows))
            ),
        ),
        f"Measured with {models.title(settings)} (`{settings['fingerprint']}`) in {settings['dtype']} on {header['device']}; {told}; "
        f"seed {settings['seed']}. {_listed(counts)} samples of each task{more}.\n",
        "```bash\n" + command(settings, rows) + "\n```\n",
        f"`reproduction/results/{file}` has the score of each sample. `--export` writes RULER's results in the format of kvpress'\n"
        "evaluation.\n",
        *about_ruler(header),
        f"![Mean score over bytes of the cache, one line per policy]({PICTURE})\n",
        "Colours mark the five policies with the best mean over the sizes at which each was measured. The others are grey.\n",
    ]
    if counts[-1] < FEW:
        parts.insert(1, "This is a small run that shows the form of the page. It does not compare the methods.\n")
    for suite, mine in suites.items():
        parts += suite_parts(suite, mine)
    return "\n".join(parts)


def conventions(rows: Sequence[Mapping[str, Any]]) -> list[Convention]:
    """The conventions that rows have, in order."""
    there = {merged.of(row) for row in rows if row["target"] is not None}
    return [of for of in CONVENTIONS if of in there]


def command(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that measured. Run it again until it prints that it is done."""
    suites = dict.fromkeys("-".join(name.split("-")[:2]) for name in settings["suites"])
    options = {"bytes": "--shares", "prompt": "--prompt-shares", "read": "--read-shares"}
    shares = {
        option: sorted(
            {row["target"] for row in rows if row["target"] is not None and merged.of(row) == of}, reverse=True
        )
        for of, option in options.items()
    }
    names = dict.fromkeys(row["policy"] for row in rows if row["policy"] != "full")
    most = max(len(row["scores"]) for row in rows if "scores" in row)
    tasks = {task: given for suite in settings["suites"].values() for task, given in suite["tasks"].items()}
    seeing = dict.fromkeys(row["policy"].partition(":")[0] for row in rows if row["seen"])
    by_default = {merged.of(row) for row in rows if row["seen"]} == {"prompt"}
    files = [f"--{name.replace('_', '-')} {tasks[name]['data']}" for name in ("qa_1", "qa_2") if name in tasks]
    default = settings["model"].endswith("(the default model)")
    model = "" if default else f" --model {models.title(settings)}"
    return " \\\n    ".join(
        [
            f"python -m reproduction.leaderboard{model} --dtype {settings['dtype']}",
            f"--suites {','.join(suites)} --samples {most} --seed {settings['seed']}",
            " ".join(
                f"{option} {','.join(f'{share:g}' for share in each) or QUOTES}" for option, each in shares.items()
            ),
            f"--tasks {','.join(tasks)}",
            *(f"--text {text}" for text in dict.fromkeys(each["text"] for each in tasks.values() if "text" in each)),
            *([" ".join(files)] if files else []),
            f"--policies {','.join(names)}",
            "--out part.jsonl" if by_default else f'--seeing "{",".join(seeing)}" --out part.jsonl',
        ]
    )


def suite_parts(suite: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the page has of one suite."""
    every, rows = rows, merged.first_samples(rows)
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"] is not None))
    counted = merged.counting(rows)
    parts = [f"## {suite}\n", f"{len(tasks)} tasks: {', '.join(tasks)}.\n"]
    if not counted:
        return [
            *parts,
            f"The full cache scores less than {100 * merged.LEAST_FULL:g} % in all of them, so means say nothing.\n",
            _not_run(rows),
        ]
    if left := [task for task in tasks if task not in counted]:
        parts.append(
            f"Means leave out {', '.join(left)}, where the full cache scores less than {100 * merged.LEAST_FULL:g} %.\n"
        )
    for of in conventions(rows):
        mine = [row for row in rows if merged.of(row) == of or row["target"] is None]
        able = {row["policy"] for row in rows if get_policy(row["policy"]).info.memory in MEMORIES[of]} - {"full"}
        early = _early(mine, counted, able)
        mine = [row for row in mine if (row["target"], row["seen"]) not in early]
        parts.append(f"### {suite}, {CONVENTIONS[of][0]}\n")
        if any(row["target"] is not None for row in mine):
            parts += _of_convention(mine, counted)
        parts += _more_samples(
            [row for row in every if merged.of(row) == of or row["target"] is None],
            counted,
            f"{suite}, {CONVENTIONS[of][0]}",
        )
        if early:
            told = ", ".join(f"{_titled(column)} ({done} of {all_})" for column, (done, all_) in early.items())
            parts.append(f"Not shown, as too few policies have been measured: {told}.\n")
        if len(tasks) > 1:
            scores = merged.by_entry(mine)
            for column in _columns(scores):
                parts += [
                    f"### {suite}, {CONVENTIONS[of][0]}: {_titled(column)}, by task\n",
                    _tasks(scores, tasks, counted, column),
                ]
    return [*parts, _not_run(rows)]


def _more_samples(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], title: str) -> list[str]:
    """A table of the policies that were asked more samples than most, where at least two of them can be compared."""
    count, usual = (
        max((len(row["scores"]) for row in each if "scores" in row), default=0)
        for each in (rows, merged.first_samples(rows))
    )
    long = merged.with_samples(rows, count, tasks)
    scores = merged.by_entry(long)
    compared = Counter((target, seen) for _, target, seen in scores)
    columns = [column for column in _columns(scores) if compared[column] > 1]
    if count == usual or not columns:
        return []
    shown = [row for row in long if row["target"] is None or (row["target"], row["seen"]) in columns]
    return [
        f"### {title}, with {count} samples of each task\n",
        f"The first {usual} samples of each task are those of the table above. Only policies that were asked all {count} are listed.\n",
        _means(shown, merged.by_entry(shown), tasks, columns, find_best=False),
    ]


def _columns(scores: Mapping[tuple[str, float | None, bool], Any]) -> list[Column]:
    return sorted({(target, seen) for _, target, seen in scores if target is not None}, key=lambda c: (-c[0], c[1]))


def _early(
    rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], policies: set[str]
) -> dict[Column, tuple[int, int]]:
    """Columns that are not shown yet: how many of these policies have been measured, of those that can be."""
    whole = {name for name, each in merged.by_entry(rows).items() if set(tasks) <= set(each)}
    places = dict.fromkeys((row["target"], row["seen"]) for row in rows if row["target"] is not None)
    found: dict[Column, tuple[int, int]] = {}
    seeing = {row["policy"] for row in rows if row["seen"]}  # `--seeing` may name some policies alone
    for place in sorted(places, key=lambda column: (-column[0], column[1])):
        unable = {row["policy"] for row in rows if row["task"] is None and (row["target"], row["seen"]) == place}
        asked = (policies & seeing if place[1] else policies) - unable
        done = sum((policy, *place) in whole for policy in asked)
        if done < LEAST_MEASURED * len(asked):
            found[place] = done, len(asked)
    return found


def _of_convention(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> list[str]:
    """Means of one convention, and what is to be said of them. `rows` include those of the full cache."""
    counted = [row for row in rows if row["task"] is None or row["task"] in tasks]
    scores = merged.by_entry(counted)
    columns = _columns(scores)
    parts = [_means(counted, scores, tasks, columns)]
    flat = [column for column in columns if not column[1] and not headroom(scores, column)]
    if flat:
        parts.append(
            f"No headroom at {' and '.join(f'{100 * share:g} %' for share, _ in flat)}: the full cache is not significantly better "
            "than\nStreamingLLM, so differences between policies mean nothing there.\n"
        )
    near = [_as_good_as_full(counted, scores, tasks, seen) for seen in (False, True)]
    parts += [told for told in (*near, _undropped(counted), _unreached(counted, columns)) if told]
    if unable := [row for row in rows if row["task"] is None]:
        parts.append(_unable(unable))
    return parts


def headroom(scores: Mapping[tuple[str, float | None, bool], Mapping[str, np.ndarray]], column: Column) -> bool:
    """Whether the full cache is clearly above StreamingLLM; True where one of them is missing."""
    full, streaming = scores.get(("full", None, False)), scores.get(("streaming_llm", *column))
    if full is None or streaming is None:
        return True
    return clearly_above(full, streaming)


def clearly_above(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> bool:
    """Whether the interval of the paired difference, over what both have, is above zero; False if they have nothing in common."""
    apart = []
    for task in (task for task in ours if task in theirs):
        size = min(len(ours[task]), len(theirs[task]))
        each = ours[task][:size] - theirs[task][:size]
        apart.append(each[~np.isnan(each)])
    if not apart:
        return False
    mean, width = means_interval(apart)
    return mean > width


def _means(
    rows: Sequence[Mapping[str, Any]],
    scores: Mapping[tuple[str, float | None, bool], Mapping[str, np.ndarray]],
    tasks: Sequence[str],
    columns: Sequence[Column],
    find_best: bool = True,
) -> str:
    full = scores.get(("full", None, False))
    held = {(row["policy"], row["target"], row["seen"]): row["held"] / row["full"] for row in rows}
    lines = [] if full is None else [["`full` (100 %)", *[_shown(full)] * len(columns)]]
    whole = {name: each for name, each in scores.items() if set(tasks) <= set(each)}
    counts = {column: sum(tuple(place) == column for _, *place in whole) for column in columns}
    first = max(columns, key=lambda column: (counts[column], -columns.index(column)), default=None)
    placed = {
        policy: merged.mean_and_error(each.values())[0]
        for (policy, *place), each in whole.items()
        if first is not None and tuple(place) == first
    }
    names = dict.fromkeys(policy for policy, target, _ in scores if target is not None)
    leading: dict[Column, list[str]] = {}
    for policy in sorted(names, key=lambda policy: -placed.get(policy, -1.0)):
        cells = []
        for column in columns:
            mine = scores.get((policy, *column))
            if mine is None:
                cells.append("")
            elif (policy, *column) not in whole:
                cells.append(f"{len(mine)} of {len(tasks)} tasks")
            else:
                others = [each for (_, *place), each in whole.items() if tuple(place) == column and each is not mine]
                best = (
                    find_best
                    and headroom(scores, (column[0], False))
                    and not any(clearly_above(each, mine) for each in others)
                )
                if best:
                    leading.setdefault(column, []).append(f"`{policy}`")
                shown = f"**{_shown(mine)}**" if best else _shown(mine)
                cells.append(f"{shown} ({100 * held[policy, *column]:.1f} %)")
        lines.append([f"`{policy}`", *cells])
    told = "".join(
        f"- **Best at {_titled(column)}:** {', '.join(leading[column])}\n" for column in columns if column in leading
    )
    told += "\n" * bool(told) + "In parentheses: share of the full cache's bytes."
    told += f" Policies are ordered by the column {_titled(first)}." if first is not None else ""
    return told + "\n\n" + report.table(["policy", *map(_titled, columns)], lines) + "\n"


def _tasks(
    scores: Mapping[tuple[str, float | None, bool], Mapping[str, np.ndarray]],
    tasks: Sequence[str],
    counted: Sequence[str],
    column: Column,
) -> str:
    """Scores by task, the best policy first. Policies for which a task is missing have no mean, and come last."""
    lines: list[tuple[float, list[str]]] = []
    for (policy, *place), mine in scores.items():
        if tuple(place) == column or policy == "full":
            whole = set(counted) <= set(mine)
            mean = merged.mean_and_error([mine[task] for task in counted])[0] if whole else -1.0
            cells = [f"{100 * np.nanmean(mine[task]):.0f}" if task in mine else "" for task in tasks]
            first = np.inf if policy == "full" else mean
            lines.append((first, [f"`{policy}`", f"{100 * mean:.1f}" if whole else "", *cells]))
    ordered = [line for _, line in sorted(lines, key=lambda each: -each[0])]
    return report.table(["policy", "mean", *(f"`{task}`" for task in tasks)], ordered) + "\n"


def _as_good_as_full(
    rows: Sequence[Mapping[str, Any]],
    scores: Mapping[tuple[str, float | None, bool], Mapping[str, np.ndarray]],
    tasks: Sequence[str],
    seen: bool,
) -> str:
    """Policies that the full cache is not significantly better than, each with the fewest bytes at which this is so; empty if none."""
    full = scores.get(("full", None, False))
    if full is None:
        return ""
    held = {(row["policy"], row["target"], row["seen"]): row["held"] / row["full"] for row in rows}
    found: dict[str, float] = {}
    for (policy, target, asked), mine in scores.items():
        if target is None or asked != seen or not set(tasks) <= set(mine):
            continue
        if headroom(scores, (target, False)) and not clearly_above(full, mine):
            found[policy] = min(found.get(policy, np.inf), held[policy, target, seen])
    told = ", ".join(
        f"`{policy}` ({100 * found[policy]:.1f} %)" for policy in sorted(found, key=lambda each: found[each])
    )
    kind = "question-aware" if seen else "question-agnostic"
    return f"**Not significantly below the full cache, {kind}, with their fewest bytes:** {told}.\n" if told else ""


def _undropped(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which policies got a budget of all tokens, since their codes alone fit the share; empty if none."""
    found: dict[str, dict[float, None]] = {}
    for row in rows:
        settings = row.get("settings", {})
        if settings.get("budget") == 1.0 or re.search(r"\bbudget=1\.0\b", str(settings.get("policy"))):
            found.setdefault(row["policy"], {})[row["target"]] = None
    told = ", ".join(f"`{policy}` at {' and '.join(f'{100 * x:g} %' for x in at)}" for policy, at in found.items())
    return f"Nothing is dropped here, since all tokens fit: {told}.\n" if told else ""


def _unreached(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """Which cells are empty for want of time alone; empty if none is."""
    there = {(row["policy"], row["target"], row["seen"]) for row in rows}
    asked = {(policy, seen) for policy, target, seen in there if target is not None}
    found: dict[str, list[str]] = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for column in columns:
            if (policy, column[1]) in asked and (policy, *column) not in there:
                found.setdefault(policy, []).append(_titled(column))
    told = ", ".join(f"`{policy}` ({'; '.join(titles)})" for policy, titles in found.items())
    return f"Not measured yet: {told}.\n" if told else ""


def _unable(rows: Sequence[Mapping[str, Any]]) -> str:
    """Policies that do not run at a share, with the reason. It may differ by a few tokens between prompts with and without the question."""
    found: dict[tuple[str, str], dict[float, set[bool]]] = {}
    for row in rows:
        found.setdefault((row["policy"], row["why"]), {}).setdefault(row["target"], set()).add(row["seen"])
    mixed = any(row["seen"] for row in rows)
    kinds = ({False, True}, ""), ({False}, ", question-agnostic" if mixed else ""), ({True}, ", question-aware")
    lines = []
    for (policy, why), shares in found.items():
        for kind, named in kinds:
            if at := sorted((share for share, seen in shares.items() if seen == kind), reverse=True):
                lines.append(f"- `{policy}`, at {' and '.join(f'{100 * share:g} %' for share in at)}{named}: {why}")
    return "These policies do not fit some shares, or cannot run:\n\n" + "\n".join(lines) + "\n"


def _not_run(rows: Sequence[Mapping[str, Any]]) -> str:
    """Registered policies that were not run."""
    run = {row["policy"].partition(":")[0] for row in rows}
    missing = ", ".join(f"`{name}`" for name in policies() if name not in run)
    return f"Not run: {missing or 'none'}.\n"


def points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the picture is drawn from: the question unseen, a point for each policy at each share."""
    found = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        mine = merged.comparable([row for row in rows if row["suite"] == suite])
        bytes_held = {(row["policy"], row["target"]): (row["held"], row["full"]) for row in mine}
        for (policy, target, _), scores in merged.by_entry(mine).items():
            held, full = bytes_held[policy, target]
            mean, _ = merged.mean_and_error(scores.values())
            found.append(
                {
                    "task": suite,
                    "policy": policy,
                    "target": target,
                    "metric": "mean score",
                    "value": mean,
                    "higher_is_better": True,
                    "cache_bytes": held,
                    "full_cache_bytes": full,
                    "tokens_per_second": None,
                }
            )
    return found


def _titled(column: Column) -> str:
    return f"{100 * column[0]:g} %, {'question-aware' if column[1] else 'question-agnostic'}"


def _shown(tasks: Mapping[str, np.ndarray]) -> str:
    mean, error = merged.mean_and_error(tasks.values())
    return f"{100 * mean:.1f}" + ("" if np.isnan(error) else f" ± {100 * error:.1f}")


def _listed(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
