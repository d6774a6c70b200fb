"""What reading in blocks costs: the tables made of a result file's rows, and files of several runs."""

import json
import math

import numpy as np
import pytest

from reproduction import block_sizes


def row(policy: str, block: int, unseen: list[float], seen: list[float], nll: float) -> dict:
    return {"policy": policy, "block": block, "unseen": {"niah": unseen}, "seen": {"niah": seen}, "nll": [nll, nll]}


ROWS = [
    row("treekv", 2048, [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], math.log(9.0)),
    row("treekv", 0, [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], math.log(8.0)),
    row("full", 0, [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], math.log(7.0)),
]


def test_tables():
    told = block_sizes.tables(ROWS)
    assert told.splitlines()[:4] == [
        "| policy | whole prompt | 2048 |",
        "| --- | ---: | ---: |",
        "| `full` | 100, 100, 7.00 |  |",
        "| `treekv` | 75, 100, 8.00 | 25, 100, 9.00 |",
    ]
    # A loss of 50 ± 92 points is not significant.
    assert told.endswith("no policy finds significantly less than with the whole prompt.**")


def test_significant_losses_are_listed():
    """Of eight prompts, seven find less: 88 ± 30 points by Student's t with 7 degrees of freedom."""
    found = np.ones(8), np.asarray([0.0] * 7 + [1.0])
    rows = [row("treekv", block, list(some), [1.0] * 8, 1.0) for block, some in zip((0, 2048), found, strict=True)]
    lost = 100 * (found[0] - found[1])
    half = 2.3646 * lost.std(ddof=1) / math.sqrt(8)
    told = block_sizes.tables(rows)
    assert told.endswith(f"| `treekv` | question-agnostic | {lost.mean():.0f} ± {half:.0f} |")


def test_merging(tmp_path, capsys):
    parts = [tmp_path / name for name in ("a.json", "b.json")]
    header = {"settings": {"samples": 4}, "versions": {}, "device": "one"}
    for part, rows in zip(parts, (ROWS[:2], ROWS[1:]), strict=True):
        part.write_text(json.dumps({"header": header, "rows": rows}))
    block_sizes.merge(parts, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert {(each["policy"], each["block"]) for each in merged["rows"]} == {
        ("treekv", 2048),
        ("treekv", 0),
        ("full", 0),
    }
    assert len(merged["rows"]) == 3
    parts[1].write_text(json.dumps({"header": header | {"device": "another"}, "rows": []}))
    with pytest.raises(SystemExit, match="other device"):
        block_sizes.merge(parts, tmp_path / "all.json")
