"""Comparisons at equal bytes: what is measured, and what is said of bytes that are not equal."""

from pathlib import Path

import pytest

import kvjax
from kvjax.cli.task_options import entries
from kvjax.evals import compare, measure
from kvjax.evals.tasks import Inputs

POLICY = kvjax.StreamingLLM(budget=64)


def test_equal_budgets_are_measured_once_and_bytes_off_target_are_told(
    letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots come in steps of 32, so that three of the targets give one budget, which holds the bytes of one of them."""
    measured = []
    run = measure.TextMeasure.run

    def counted(ready, policy, *rest):
        measured.append(policy)
        return run(ready, policy, *rest)

    monkeypatch.setattr(measure.TextMeasure, "run", counted)
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijklm nopq " * 10)
    inputs = Inputs(text=text, lengths=(128,))
    targets = (0.27, 0.3, 0.45)
    with pytest.warns(
        UserWarning, match=r"streaming_llm: holds 25\.\d % of the full cache's bytes, not (30|45) % as asked"
    ) as told:
        cells = compare.compare(letters, [POLICY], targets, ["perplexity"], inputs, tmp_path)
    assert [cell.target for cell in cells] == [None, *targets]
    assert len({str(policy) for policy in measured}) == len(measured) == 2  # the full cache's, and one of StreamingLLM
    assert len({cell.outcome.value for cell in cells[1:]}) == 1
    assert [cell.on_target for cell in cells] == [True, True, False, False]
    assert sum("as asked" in str(warning.message) for warning in told) == 2
    page = compare.markdown(cells)
    assert page.count(" *)") == 2
    assert "more than 10 % off the asked share of bytes" in page


def test_policies_of_one_name_have_files_and_rows_of_their_own(letters, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijklm nopq " * 10)
    inputs = Inputs(text=text, lengths=(128,))
    policies = [kvjax.StreamingLLM(sinks=1), kvjax.StreamingLLM(sinks=4)]
    with pytest.warns(UserWarning, match="as asked"):
        cells = compare.compare(letters, policies, (0.4,), ["perplexity"], inputs, tmp_path / "out")
    labels = ["full", "streaming_llm:sinks=1", "streaming_llm"]
    assert [cell.outcome.policy for cell in cells] == labels
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 3
    assert all(compare.markdown(cells).count(f"| `{label}`") == 1 for label in labels)


def test_policies_that_differ_in_what_the_target_sets_have_rows_of_their_own(letters, tmp_path: Path) -> None:
    """Both get the same budget, which is measured once. A policy or a target given twice has one row."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijklm nopq " * 10)
    policies = [POLICY, kvjax.StreamingLLM(budget=96), POLICY]
    with pytest.warns(UserWarning, match="as asked"):
        cells = compare.compare(letters, policies, (0.4, 0.4), ["perplexity"], Inputs(text=text, lengths=(128,)))
    assert [cell.outcome.policy for cell in cells] == ["full", "streaming_llm:budget=64", "streaming_llm:budget=96"]
    assert cells[1].outcome.value == cells[2].outcome.value


def test_policies_with_budgets_of_their_own_are_measured_once(letters, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh ijklm nopq " * 10)
    inputs = Inputs(text=text, lengths=(128,))
    count = letters.config.num_layers
    policy = kvjax.by_layer([kvjax.StreamingLLM(budget=32)] * count)
    full, cell = compare.compare(letters, [policy], (0.5, 0.9), ["perplexity"], inputs)
    assert cell.target is None
    assert cell.share < 0.6
    assert entries(cell.outcome)["Budget"] == "its own"
    assert entries(full.outcome)["Budget"] == "does not apply"
    page = compare.markdown([full, cell])
    assert "| policy | result |" in page
    assert "| `full` (no budget) | " in page
    assert f"| `by_layer(streaming_llm)` (budgets of its own) | {compare.entry(cell)} |" in page
