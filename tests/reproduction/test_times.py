"""Claims about time and memory: the rule by which they are judged, by hand, and that each finds its measurements."""

import dataclasses

import pytest

from reproduction.claims import times
from reproduction.claims.times import FACTORS, Factor

FASTER = Factor("says", "where", "paper", "TPOT", "chelsea", "full", 64, {"budget": 0.2})


def row(policy: str, runs: list[float], peak: int = 10**9, batch_run: int = 1, **settings: float) -> dict:
    return {
        "program": "kvjax",
        "policy": policy,
        "context": 64,
        "batch": 1,
        "batch_run": batch_run,
        "prefill": False,
        "settings": settings,
        "tpot_all_ms": [99.0, *runs],
        "peak_bytes": peak,
    }


def test_verdicts_by_hand():
    """Means 2 and 4 of runs that differ by 0.1: twice as fast. Runs that scatter by more than the difference are undecided. The first call does not count."""
    full = row("full", [4.0, 4.1, 3.9])
    mine = row("chelsea", [2.0, 2.1, 1.9], budget=0.2)
    assert FASTER.ours([full, mine]) == "2.00 ms, 4.00 ms: 2.00 times"
    assert FASTER.verdict([full, mine]) == "holds"
    assert FASTER.verdict([full, row("chelsea", [6.0, 6.1, 6.2], budget=0.2)]) == "fails"
    assert FASTER.verdict([full, row("chelsea", [1.0, 7.0, 3.0], budget=0.2)]) == "undecided"
    assert FASTER.verdict([full, row("chelsea", [2.0], budget=0.5)]) == "not measured"
    near = [full, row("chelsea", [4.1, 4.2, 4.15], budget=0.2)]
    assert dataclasses.replace(FASTER, margin=0.1).verdict(near) == "holds"
    assert FASTER.verdict([full, mine, row("chelsea", [9.0, 9.1], budget=0.2)]) == "fails"  # the latest counts


def test_runs_of_one_kind_are_compared():
    """One of them with its prompt read, the other without: no pair."""
    rows = [row("full", [4.0, 4.1]) | {"prefill": True}, row("chelsea", [2.0, 2.1], budget=0.2)]
    assert FASTER.verdict(rows) == "not measured"
    assert FASTER.verdict([*rows, row("full", [4.0, 4.1])]) == "holds"


def test_more_is_better_of_tokens_per_second():
    rate = dataclasses.replace(FASTER, measure="tokens per second")
    rows = [row("full", [4.0, 4.0, 4.1]), row("chelsea", [8.0, 8.0, 8.1], batch_run=8, budget=0.2)]
    assert rate.verdict(rows) == "holds"
    assert rate.ours(rows) == "1000, 250: 4.00 times"


def test_memory_is_compared_as_it_is():
    held = dataclasses.replace(FASTER, measure="memory")
    rows = [row("full", [1.0], 3 * 10**9), row("chelsea", [1.0], 2 * 10**9, budget=0.2)]
    assert held.measured(rows) == "memory of decoding"
    assert (held.verdict(rows), held.ours(rows)) == ("holds", "2.0 GB, 3.0 GB: 1.50 times")


@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.says[:50])
def test_every_claim_is_about_something_that_is_measured(factor):
    rows = times.recorded()["rows"]
    assert factor.verdict(rows) != "not measured"
    assert factor.ours(rows) in times.render(factor.method, times.recorded())
