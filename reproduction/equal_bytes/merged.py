"""Merge the parts that runs have written into one result file: a score for each sample, without the answers."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvjax.evals.intervals import standard_error
from kvjax.evals.report import read_rows
from reproduction.sections import RESULTS

KEY = ("suite", "task", "policy", "target", "seen")
"""What identifies an entry, with `of`. All entries of a suite and task have the same samples."""


def of(row: Mapping[str, Any]) -> str:
    """What a row's share is of, see `cells.Convention`."""
    return row.get("of", "bytes")


def write(parts: Sequence[Path]) -> Path:
    """Make the result file.

    Raises:
        SystemExit: parts are of different models, versions or settings.
    """
    content = merge(parts)
    kind = content["header"]["settings"]["kind"].partition(" (")[0]
    path = RESULTS / f"leaderboard-{report.slug(kind)}.json"
    report.write(path, content["header"], content["rows"])
    return path


def merge(parts: Sequence[Path]) -> dict[str, Any]:
    """Header and rows of all parts, which may include a result file. Of a batch in two parts, the first one counts."""
    headers = [_header(part) for part in parts]
    first = headers[0]
    for part, other in zip(parts, headers, strict=True):
        for name in ("versions", "settings"):
            mine, its = dict(first[name]), dict(other[name])
            if name == "settings":
                suites = mine.pop("suites"), its.pop("suites")
                shared = suites[0].keys() & suites[1].keys()
                mine["suites"], its["suites"] = ({suite: of[suite] for suite in shared} for of in suites)
            if mine != its:
                raise SystemExit(f"{part} was measured with other {name} than {parts[0]}: {its}, {mine} there")
    suites = {name: settings for each in headers for name, settings in each["settings"]["suites"].items()}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        for row in _rows(part):
            _add(found, row)
    rows = [{**row, "scores": _listed(row["scores"])} if "scores" in row else row for row in found.values()]
    date = max(each["date"] for each in headers)
    return {"header": {**first, "date": date, "settings": {**first["settings"], "suites": suites}}, "rows": rows}


def _add(found: dict[tuple[Any, ...], dict[str, Any]], row: Mapping[str, Any]) -> None:
    """One batch's scores to the entry that they belong to."""
    key = *(row[name] for name in KEY), of(row)
    kept = ("settings", "held", "full", "why")
    entry = found.setdefault(key, {**{name: row[name] for name in (*KEY, "of", *kept) if name in row}})
    for name in kept:
        if name in row and entry.get(name) != row[name]:
            raise SystemExit(f"{key}: {name} is {row[name]} in one part, and {entry.get(name)} in another")
    if "scores" in row:
        scores = entry.setdefault("scores", {})
        for i, score in enumerate(row["scores"], row.get("first", 0)):
            if score is not None:
                scores.setdefault(i, score)


def _listed(scores: Mapping[int, float]) -> list[float | None]:
    """By sample; None where there is no score."""
    return [scores.get(i) for i in range(max(scores) + 1)]


def _rows(part: Path) -> Iterable[dict[str, Any]]:
    return report.read(part)["rows"] if part.suffix == ".json" else read_rows(part)


def _header(part: Path) -> dict[str, Any]:
    if part.suffix == ".json":
        return report.read(part)["header"]
    with part.open(encoding="utf-8") as file:
        return json.loads(file.readline())["header"]


def recorded() -> Path:
    """The result file that the page is made from: of one device, the one that is there.

    Raises:
        SystemExit: there is none, or more than one.
    """
    found = sorted(RESULTS.glob("leaderboard-*.json"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} result files {[path.name for path in found]}; there should be one")
    return found[0]


LEAST_FULL = 0.5
"""A task counts only where the full cache has at least this mean score."""


def first_samples(rows: Sequence[Mapping[str, Any]], count: int | None = None) -> list[Mapping[str, Any]]:
    """Rows with the scores of their first samples alone, so that all policies are compared on the same prompts.

    Args:
        rows: of one suite. Those without scores are returned as they are.
        count: the number of samples; by default the one that most rows have. Rows that have fewer keep what they have.
    """
    lengths = Counter(len(row["scores"]) for row in rows if "scores" in row)
    most = count or min(lengths, key=lambda length: (-lengths[length], length), default=0)
    return [{**row, "scores": row["scores"][:most]} if "scores" in row else row for row in rows]


def with_samples(rows: Sequence[Mapping[str, Any]], count: int, tasks: Sequence[str]) -> list[Mapping[str, Any]]:
    """Rows of these tasks, of the policies and shares at which all of them have this many samples."""
    scored = [row for row in rows if row["task"] in tasks and "scores" in row]
    long = [row for row in scored if np.sum(~np.isnan(samples(row)[:count])) == count]
    found: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in long:
        found[row["policy"], row["target"], row["seen"], of(row)].add(row["task"])
    return [row for row in long if set(tasks) <= found[row["policy"], row["target"], row["seen"], of(row)]]


def by_entry(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, float | None, bool], dict[str, np.ndarray]]:
    """Scores by task, of every policy at every share."""
    found: dict[tuple[str, float | None, bool], dict[str, np.ndarray]] = {}
    for row in rows:
        if "scores" in row:
            found.setdefault((row["policy"], row["target"], row["seen"]), {})[row["task"]] = samples(row)
    return found


def counting(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tasks that count: those that the full cache can do, where its scores are known."""
    full = by_entry(rows).get(("full", None, False), {})
    tasks = dict.fromkeys(row["task"] for row in rows if row["task"] is not None)
    return [task for task in tasks if task not in full or np.nanmean(full[task]) >= LEAST_FULL]


def comparable(
    rows: Sequence[Mapping[str, Any]], share_of: str = "bytes", *, seen: bool = False
) -> list[Mapping[str, Any]]:
    """Rows with scores of one convention, and of the full cache, in tasks that count.

    A policy has no rows at a share if one of the tasks is missing there. All rows have the first samples alone, see `first_samples`.

    Args:
        rows: all rows of a suite.
        share_of: what the shares are of, see `of`.
        seen: whether the prompt was compressed with the question in sight.
    """
    scored = [row for row in first_samples(rows) if "scores" in row]
    chosen = [row for row in scored if row["policy"] == "full" or (of(row) == share_of and row["seen"] == seen)]
    tasks = counting(chosen)
    whole = {name for name, each in by_entry(chosen).items() if set(tasks) <= set(each)}
    return [row for row in chosen if row["task"] in tasks and (row["policy"], row["target"], row["seen"]) in whole]


def samples(row: Mapping[str, Any]) -> np.ndarray:
    """Scores by sample, NaN where there is none."""
    return np.asarray([np.nan if score is None else score for score in row["scores"]], float)


def mean_and_error(tasks: Iterable[np.ndarray]) -> tuple[float, float]:
    """The mean over tasks of the mean over samples, and its standard error, where samples of each task are drawn apart."""
    known = [each[~np.isnan(each)] for each in tasks]
    means = [float(np.mean(each)) for each in known]
    errors = [standard_error(each) for each in known]
    return float(np.mean(means)), float(np.sqrt(np.sum(np.square(errors)))) / len(errors)
