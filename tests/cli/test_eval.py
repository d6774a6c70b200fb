"""`kvjax eval` and `kvjax compare`: what they print, what they write, and that they go on where they were."""

import csv
import json
from pathlib import Path

import pytest

from kvjax.evals.budgets import matched
from kvjax.evals.plan import Batch, Plan
from kvjax.policies import ChunkKV, ClusterKV, Full, PolicyError, StreamingLLM


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("One fish. Two fish. Red fish. Blue fish. " * 12)
    return file


def run(command, *arguments):
    result = command(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_perplexity(kvjax_command, checkpoint, book, tmp_path):
    out = tmp_path / "perplexity.jsonl"
    arguments = ("eval", "perplexity", "--model", checkpoint, "--text", book, "--length", 100, "--out", out, "--json")
    streamed = run(kvjax_command, *arguments, "--policy", "streaming_llm", "--budget", 32)
    assert (streamed["metric"], streamed["count"], streamed["higher_is_better"]) == ("perplexity", 99, False)
    assert streamed["cache_bytes"] < streamed["full_cache_bytes"]
    again = run(kvjax_command, *arguments, "--policy", "streaming_llm", "--budget", 32)
    assert again == streamed
    other = kvjax_command(*arguments, "--policy", "streaming_llm", "--budget", 48)
    assert other.exit_code == 1
    assert "holds results of another run" in other.stderr
    whole = run(kvjax_command, *arguments[:-3], "--window", 50, "--stride", 25, "--json")
    assert whole["count"] == 99
    assert whole["value"] > 1


@pytest.mark.filterwarnings("ignore:.* of the full cache's bytes")
def test_a_comparison_is_matched_by_bytes_and_resumes(kvjax_command, checkpoint, book, tmp_path, params):
    out, plot = tmp_path / "results", tmp_path / "tradeoff.svg"
    arguments = ("compare", "--model", checkpoint, "--policies", "streaming_llm", "--tasks", "fidelity,perplexity")
    arguments += ("--text", book, "--length", 120, "--budgets", "0.5", "--out", out, "--plot", plot, "--json")
    rows = run(kvjax_command, *arguments)
    assert [(row["task"], row["policy"], row["target"]) for row in rows] == [
        (task, policy, target)
        for task in ("fidelity", "perplexity")
        for policy, target in (("full", None), ("streaming_llm", 0.5))
    ]
    assert [row["budget_applies"] for row in rows] == [False, True] * 2
    assert [row["on_target"] for row in rows] == [
        abs(row["share"] / (row["target"] or row["share"]) - 1) <= 0.1 for row in rows
    ]
    for row in rows:
        assert row["share"] <= (1 if row["target"] is None else 0.5)
    table = json.loads((out / "table.json").read_text())
    assert table["header"]["settings"]["model"].startswith("llama-")
    assert table["rows"][1]["settings"]["budget"] == rows[1]["budget"]
    assert [row["task"] for row in csv.DictReader((out / "table.csv").read_text().splitlines())] == [
        row["task"] for row in rows
    ]
    markdown = (out / "table.md").read_text()
    assert "| policy | 50 % |" in markdown
    assert "| `full` (no budget) | " in markdown
    star = "" if rows[1]["on_target"] else " *"
    assert f"| `streaming_llm` | {rows[1]['output error']:.3f} ({100 * rows[1]['share']:.0f} %{star})" in markdown
    assert "streaming_llm" in plot.read_text()
    before = {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
    assert len(before) == 4
    assert run(kvjax_command, *arguments) == rows
    assert {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")} == before


@pytest.mark.filterwarnings("default:positions up to")
def test_a_needle_map(kvjax_command, checkpoint, tmp_path):
    """The checkpoint's window of 128 bytes is too short for a needle: the model warns, and answers all the same."""
    out, plot = tmp_path / "needle.jsonl", tmp_path / "map.svg"
    arguments = ("--no-chat", "--length", "230", "--depths", "0,1", "--out", out, "--plot", plot, "--batch", 2)
    result = kvjax_command("eval", "needle-number", "--model", checkpoint, *arguments)
    assert result.exit_code == 0, result.stderr
    assert "warning: positions up to" in result.stderr
    assert "not known when compressed" in result.stdout
    assert "by depth" in result.stdout
    assert len(out.read_text().splitlines()) == 3
    assert "depth of the needle" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "nope"), "unknown task 'nope'; there are perplexity"),
        (("eval", "perplexity", "--text", "nowhere.txt"), "nowhere.txt: no such file"),
        (("eval", "vt", "--policy", "nope"), "unknown policy"),
        (("eval", "vt", "--plot", "map.png"), "give a needle task"),
        (("eval", "vt", "--length", "many"), "numbers separated by commas"),
        (("compare", "--policies", "full", "--tasks", "nope", "--out", "x"), "unknown task 'nope'"),
        (("compare", "--policies", "full", "--tasks", "vt", "--out", "x", "--distributed"), "processes share a mesh"),
    ],
)
def test_mistakes_show_before_a_model_is_loaded(kvjax_command, monkeypatch, arguments, says):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "300")
    result = kvjax_command(*arguments)
    assert result.exit_code in (1, 2)
    assert says in result.stderr


@pytest.mark.parametrize("policy", [StreamingLLM(), ChunkKV(chunk=4, window=4)], ids=lambda policy: policy.info.name)
def test_matched_budgets_are_the_largest_that_fit(params, policy):
    """Against trying them all."""
    plan = Plan(params, (Batch(100, 28),))
    whole = round(plan.bytes_held(Full()))
    for target in range(whole // 8, whole, whole // 3):
        fits = []
        for budget in range(1, 129):
            try:
                tried = type(policy)(**{**vars(policy), "budget": budget})
                tried.validate(128)
                fits += [budget] if plan.bytes_held(tried) <= target else []
            except PolicyError:
                continue
        found = matched(policy, target, plan)
        assert found.budget == max(fits) if fits else plan.bytes_held(found) > target


def test_what_cannot_be_matched_runs_as_small_as_it_can(params):
    plan = Plan(params, (Batch(100, 28),))
    found = matched(ClusterKV(), plan.bytes_held(Full()) / 4, plan)
    assert plan.bytes_held(found) > plan.bytes_held(Full()) / 4
    assert matched(Full(), 1, plan) == Full()


def test_a_sweep_needs_no_special_case(kvjax_command, checkpoint, book, tmp_path):
    """Of policies without a budget there is one result, which says that a budget does not apply; a second run goes on."""
    out = tmp_path / "results"
    arguments = ("eval", "perplexity", "--model", checkpoint, "--text", book, "--length", 40, "--out", out)
    arguments += (
        "--policies",
        "FULL,kivi,streaming_llm",
        "--budgets",
        "0.5,16",
        "--set",
        "group=8",
        "--set",
        "residual=8",
    )
    found = run(kvjax_command, *arguments, "--json")
    assert [(row["policy"], row["budget_applies"], row["settings"].get("budget")) for row in found] == [
        ("full", False, None),
        ("kivi", False, None),
        ("streaming_llm", True, 0.5),
        ("streaming_llm", True, 16),
    ]
    names = ["perplexity-full", "perplexity-kivi", "perplexity-streaming_llm-0.5", "perplexity-streaming_llm-16"]
    assert sorted(file.stem for file in out.iterdir()) == names
    table = kvjax_command(*arguments).stdout.split("\n")[:-1]
    assert table[0].split() == ["Policy", "Budget", "perplexity", "n", "Cache", "Of", "full", "Tokens/s"]
    assert ["does not apply" in line for line in table[1:]] == [True, True, False, False]
