"""Tables of quality in docs/, made from the result files; `python -m reproduction.tables` prints them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.tables import decoded
from reproduction import block_sizes
from reproduction.equal_bytes import merged

RESULTS = Path(__file__).parent / "results"

BLOCK_SIZE_MODELS = "smollm2-135m", "qwen2.5-coder-1.5b"
"""Models that chunked prefill was measured with."""


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a result file."""
    return report.read(RESULTS / name)["rows"]


def perplexity() -> str:
    """Perplexity of each part of a long text, one row per policy."""
    measured = rows("streaming-perplexity-h200.json")
    parts = list(measured[0]["parts"])
    heads = ["policy", *(part.replace("-", " to ") for part in parts), "all", "cache"]
    cells = [
        [
            f"`{row['policy']}`",
            *(f"{row['parts'][part]:.1f}" for part in parts),
            f"{row['perplexity']:.2f}",
            _megabytes(row),
        ]
        for row in measured
    ]
    return report.table(heads, cells)


def quality(measured: list[dict[str, Any]]) -> str:
    """Perplexity and agreement with the full cache, one row per policy, one column per budget.

    Args:
        measured: rows of `policy_quality`.
    """
    budgets = sorted({row["budget"] for row in measured if row["budget"] is not None})
    lines = []
    for name in dict.fromkeys(row["policy"] for row in measured):
        cells = {row["budget"]: ", ".join(_quality_cells(row)) for row in measured if row["policy"] == name}
        # A policy without a budget has the same figures in all columns.
        lines.append([f"`{name}`", *(cells.get(budget, cells.get(None, "")) for budget in budgets)])
    return report.table(["policy", *(f"{100 * budget:g} %" for budget in budgets)], lines)


def measured_quality() -> list[dict[str, Any]]:
    """Rows of the comparison of policies, which took several runs on the same texts."""
    runs = ("", "catekv-", "baselines-1-", "baselines-2-")
    found = [row for run in runs for row in rows(f"policy-quality-{run}h200.json")]
    return list({(row["policy"], row["budget"]): row for row in found}.values())


def quality_of(name: str) -> str:
    """Perplexity and agreement of one method, one row per budget; empty if it was not measured."""
    mine = [row for row in measured_quality() if row["policy"].split(",")[0] == name]
    lines = [
        [
            f"{100 * row['budget']:g} %" if row["budget"] is not None else row["policy"].partition(", ")[2] or "any",
            *_quality_cells(row),
        ]
        for row in mine
    ]
    return report.table(["budget", "perplexity", "top-1 token as the full cache's", "cache"], lines) if mine else ""


def full_quality() -> str:
    """Perplexity and bytes of the full cache in the comparison of policies."""
    (row,) = (row for row in measured_quality() if row["policy"] == "full")
    return f"perplexity {row['perplexity']:.2f} and {_megabytes(row)}"


def question_agnostic(best: int = 5) -> str:
    """The best policies of the leaderboard at 25 % of the full cache's bytes, and the full cache: mean score on RULER ± standard error.

    Args:
        best: number of policies.
    """
    return _best(merged.comparable(rows("leaderboard-h200.json")), best)


def leaderboard_of(name: str) -> str:
    """A policy's mean scores on RULER ± standard error by share of the full cache's bytes, beside the full cache; empty if it was not measured.

    Tasks are the question-agnostic ones of the leaderboard.
    """
    scores, shares = defaultdict[tuple[str, float | None], list[np.ndarray]](list), {}
    for row in merged.comparable(rows("leaderboard-h200.json")):
        if row["policy"] in (name, "full"):
            case = row["policy"], row["target"]
            scores[case].append(merged.samples(row))
            shares[case] = row["held"] / row["full"]
    if not any(policy == name for policy, _ in scores):
        return ""
    lines = []
    for policy, target in sorted(scores, key=lambda case: (case[0] != name, -(case[1] or 1))):
        mean, error = merged.mean_and_error(scores[policy, target])
        lines.append([f"`{policy}`", f"{100 * shares[policy, target]:.1f} %", f"{100 * mean:.1f} ± {100 * error:.1f}"])
    return report.table(["policy", "bytes", "score, %"], lines)


def question_aware(best: int = 5) -> str:
    """The best policies of the leaderboard that keep 25 % of prompts with their question, and the full cache: mean score on RULER ± standard error.

    Args:
        best: number of policies.
    """
    return _best(merged.comparable(rows("leaderboard-h200.json"), "prompt", seen=True), best)


def _best(measured: Sequence[Mapping[str, Any]], best: int) -> str:
    scores = defaultdict[str, list[np.ndarray]](list)
    for row in measured:
        if row["target"] in (0.25, None):
            scores[row["policy"]].append(merged.samples(row))
    found = {name: merged.mean_and_error(tasks) for name, tasks in scores.items()}
    ranked = sorted(found, key=lambda name: (name != "full", -found[name][0]))
    lines = [[f"`{name}`", f"{100 * found[name][0]:.1f} ± {100 * found[name][1]:.1f}"] for name in ranked[: best + 1]]
    return report.table(["policy", "score, %"], lines)


def choices() -> str:
    """Bytes of every method at 25 %, and time per token at 64k × 8; the fewest bytes first."""
    measured = [row for row in measured_quality() if row["budget"] in (0.25, None)]
    (full,) = (row for row in measured if row["policy"] == "full")
    fast = {
        row["policy"]: row["tpot_ms"]
        for row in reversed(decoded("kvjax"))
        if (row["context"], row["batch"]) == (65536, 8) and len(row["settings"]) <= 1
    }
    lines = []
    for row in sorted(measured, key=lambda row: row["cache_bytes"]):
        name, _, bits = row["policy"].partition(", ")
        lines.append(
            [
                f"`{name}`" + f", {bits}" * bool(bits),
                f"{100 * row['cache_bytes'] / full['cache_bytes']:.0f} %",
                "" if bits or name not in fast else f"{fast[name]:.2f}",
            ]
        )
    return report.table(["policy", "bytes, of the full cache's", "TPOT, ms"], lines)


def needles_of(name: str) -> str:
    """Scores of a method with whole prompts and with chunked prefill, beside the full cache; empty if it was not measured."""
    found = {(row["policy"], row["block"]): row for row in rows("block-sizes-smollm2-135m-h200.json")}
    lines = []
    for policy in dict.fromkeys((name, "full")):
        for _, block in sorted(key for key in found if key[0] == policy and (policy == name or not key[1])):
            how = f"in blocks of {block}" if block else "whole"
            lines.append([f"`{policy}`", how, *block_sizes.cells(found[policy, block])])
    heads = ["policy", "prefill", "question-agnostic", "question-aware", "perplexity"]
    return report.table(heads, lines, "llr") if (name, 0) in found else ""


def reading_in_blocks(model: str) -> str:
    """Scores and perplexity by block size, one row per policy, and the policies that lose with blocks of 2048.

    Args:
        model: its name in names of result files.
    """
    return block_sizes.tables(rows(f"block-sizes-{model}-h200.json"))


def _quality_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['perplexity']:.2f}", f"{100 * row['agreement']:.1f} %", _megabytes(row)


def _megabytes(row: dict[str, Any]) -> str:
    return f"{row['cache_bytes'] / 1e6:.0f} MB"


if __name__ == "__main__":
    print(
        perplexity(),
        quality(measured_quality()),
        question_agnostic(),
        question_aware(),
        choices(),
        *map(reading_in_blocks, BLOCK_SIZE_MODELS),
        sep="\n\n",
    )
