"""`benchmarks.test_times`: how seconds are divided among phases, and rows among files."""

from pathlib import Path

import pytest

from benchmarks import report, test_times

ROOT = Path(__file__).parents[1]


def test_a_moment_counts_once_and_as_the_innermost_phase():
    """Compilation within tracing is compilation; two spans of tracing that overlap are as long as both together."""
    spans = [("trace", 0.0, 4.0), ("trace", 3.0, 6.0), ("lower", 6.0, 7.0), ("compile", 1.0, 3.0), ("cached", 2.0, 3.0)]
    found = test_times.exclusive(spans)
    assert found == pytest.approx({"cached": 1, "compile": 1, "lower": 1, "trace": 4})
    assert set(test_times.exclusive([]).values()) == {0.0}


def line(test: str, cpu: float, compiled: float) -> dict:
    phases = {"cached": 0.0, "compile": compiled, "lower": 0.0, "trace": 0.0}
    return {"test": test, "seconds": 2 * cpu, "cpu": cpu, "programs": 3, **phases}


def test_files_are_sums_of_their_tests_and_the_dearest_comes_first():
    lines = [line("a.py::one", 1.0, 0.5), line("b.py::one", 5.0, 0.0), line("a.py::two[x::y]", 2.0, 1.0)]
    first, second = test_times.by_file(lines)
    assert (first["what"], first["cpu"], first["rest"]) == ("b.py", 5.0, 10.0)
    assert (second["what"], second["tests"], second["programs"], second["compile"]) == ("a.py", 2, 6, 1.5)
    assert second["rest"] == 4.5


def test_imports_and_collection_are_not_counted_as_tests():
    lines = [line("imports", 1.0, 0.0), line("collection", 1.0, 0.0), line("a.py::one", 1.0, 0.5)]
    found = test_times.total(lines)
    assert (found["tests"], found["programs"], found["cpu"]) == (1, 9, 3.0)


def test_the_page_has_the_shares_of_the_recorded_run():
    run = report.read(ROOT / "benchmarks/results/test-times-default.json")["rows"][0]
    compiled, prepared, rest = (
        f"{sum(run[phase] for phase in phases) / run['seconds']:.0%}".replace("%", " %")
        for phases in (["compile"], ["trace", "lower"], ["rest"])
    )
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    assert (
        f"XLA compiles for {compiled} of the seconds, JAX traces and lowers for {prepared}. {rest} are execution"
        in text
    )
