"""`kvjax recommend`: what it prints and writes. `test_arguments.py` has what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli.recommend import WIDTH, picture
from kvjax.evals.recommend import Contender
from kvjax.policies import get_policy


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 1000)))
    return file


@pytest.mark.slow
def test_a_text(kvjax_command, checkpoint: Path, book: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "results", tmp_path / "tradeoff.svg"
    arguments = ("recommend", "--model", checkpoint, "--text", book, "--length", 104, "--samples", 6, "--batch", 2)
    arguments += ("--ratio", 0.8, "--policies", "streaming_llm:sinks=1,snapkv,knorm", "--out", out, "--plot", plot)
    result = kvjax_command(*arguments)
    assert result.exit_code == 0, result.stderr
    head, _, *lines = result.stdout.splitlines()
    assert head == "text: log-probability per token, with 95 % intervals. At most 80.0 % of the full cache's bytes."
    found = json.loads((out / "recommendation.json").read_text())
    table = lines[1 : len(found["rows"]) + 1]
    assert table[0].startswith("full")
    shares = [float(line.split()[1]) for line in table]
    assert shares == sorted(shares, reverse=True)
    for row, line in zip(
        sorted(found["rows"], key=lambda row: (-row["cache_bytes"], -row["value"])), table, strict=True
    ):
        assert f"{row['value']:.3f} ± {row['interval']:.3f}" in line
        assert "●" in line
    assert f"knorm was not measured: {found['excluded']['knorm']}." in result.stdout
    assert result.stdout.rstrip().endswith(found["verdict"])
    assert "streaming_llm" in plot.read_text()
    as_json = json.loads(kvjax_command(*arguments, "--json").stdout)
    assert as_json["verdict"] == found["verdict"]
    assert as_json["rows"] == found["rows"]


def test_pictures() -> None:
    half = Contender(get_policy("full"), None, 1, 1, (0.4, 0.6) * 8)
    line = picture(half, 0.0, 1.0)
    assert line.index("●") == WIDTH // 2
    assert line.strip("─● ") == ""
    assert line.count("─") == 2 * round(half.interval * (WIDTH - 1))
    assert len(picture(half, 0.5 - half.interval, 0.5 + half.interval)) == WIDTH
    assert picture(half, 0.5, 0.5) == " " * (WIDTH // 2) + "●"
