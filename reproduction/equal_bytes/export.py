"""RULER's results as kvpress' evaluation writes them, which its public leaderboard reads: a folder for each policy and ratio.

Folders are named `ruler__LENGTH__MODEL__PRESS__RATIO[__query_aware]`, and hold `metrics.json` (per task, in percent), `predictions.csv`
and `config.yaml` (kvpress 0.5.5, `evaluation/evaluate.py`). The ratio is the share of the full cache's bytes that is *not* held.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # flax and huggingface_hub, without which there is no kvjax, require it

from kvjax.evals.report import read_rows
from kvjax.evals.report import write as write_file

from . import merged

PRESSES = {"full": "no_press", "adakv": "adakv_snapkv", "h2o": "observed_attention"}
"""What kvpress calls policies that it has under other names; the others have the names they have here."""

COLUMNS = ("task", "answer", "predicted_answer", "compression_ratio")


def write(folder: Path, parts: Sequence[Path]) -> list[Path]:
    """Write the folders, and tell which."""
    header = merged.merge(parts)["header"]
    found: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for part in parts:
        for row in read_rows(part):
            if "scores" in row and row["suite"].startswith("ruler-"):
                samples = found.setdefault(_name(header, row), {})
                for i in range(len(row["scores"])):
                    one = {name: [row[name][i]] for name in ("scores", "answers", "references")}
                    samples.setdefault((row["task"], row["first"] + i), {**row, **one})
    for name, samples in found.items():
        rows = list(samples.values())
        write_file(folder / name / "metrics.json", json.dumps(_metrics(rows), indent=4) + "\n")
        write_file(folder / name / "predictions.csv", _predictions(rows))
        write_file(folder / name / "config.yaml", yaml.safe_dump(_config(header, rows[0]), sort_keys=False))
    return [folder / name for name in found]


def _ratio(row: Mapping[str, Any]) -> float:
    """Share of the full cache's bytes that was asked to go."""
    return 0.0 if row["target"] is None else 1 - row["target"]


def _name(header: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A folder's name."""
    length, model = row["suite"].partition("-")[2], header["settings"]["model"].partition(" (")[0].replace("/", "--")
    parts = ["ruler", length, model, _press(row), f"{_ratio(row):.2f}", "query_aware" if row["seen"] else ""]
    return "__".join(filter(None, parts))


def _press(row: Mapping[str, Any]) -> str:
    return str(PRESSES.get(row["policy"], row["policy"]))


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["task"], []).extend(row["scores"])
    return {task: {"string_match": round(100 * float(np.mean(scores[task])), 2)} for task in sorted(scores)}


def _predictions(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        for references, answer in zip(row["references"], row["answers"], strict=True):
            writer.writerow([row["task"], references, answer, f"{1 - row['held'] / row['full']:.4f}"])
    return text.getvalue()


def _config(header: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of kvpress' configuration, and what was measured with."""
    return {
        "dataset": "ruler",
        "data_dir": row["suite"].partition("-")[2],
        "haystack": header["settings"]["suites"][row["suite"]]["tasks"].get(row["task"], {}).get("text"),
        "model": header["settings"]["model"].partition(" (")[0],
        "press_name": _press(row),
        "compression_ratio": _ratio(row),
        "query_aware": row["seen"],
        "seed": header["settings"]["seed"],
        "press_init_command": f"kvjax {row['policy']} {json.dumps(row['settings'])}",
        "model_kwargs": {"dtype": header["settings"]["dtype"]},
        "device": header["settings"]["kind"],
        "versions": dict(header["versions"]),
    }
