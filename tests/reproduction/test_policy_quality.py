"""The script that compares policies: what it writes and prints follows from the predictions."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.evals import Perplexity
from reproduction import models, policy_quality, tables
from reproduction.analyses.continuation import Continuation, continuation
from reproduction.policy_quality import Measured

TEXTS = np.random.default_rng(8).integers(0, 64, size=(2, 80)).tolist()


def test_a_row_by_hand():
    """Two texts of two predictions each: mean log-likelihood -(1 + 2 + 3 + 6) / 4 = -3, 3 of 4 places agree."""
    predicted = [([-1.0, -2.0], [5, 6]), ([-3.0, -6.0], [7, 9])]
    texts = [Continuation(Perplexity(np.asarray(x), 1000), np.asarray(y)) for x, y in predicted]
    full = [texts[0], Continuation(texts[1].scores, np.asarray([7, 8]))]
    policy = kvjax.ChunkKV(budget=0.25)
    row = policy_quality.row(
        Measured(policy, texts, 2.0), Measured(kvjax.Full(), full, 1.0), [Path("a.txt"), Path("b.txt")]
    )
    assert row["perplexity"] == pytest.approx(np.exp(3))
    assert (row["policy"], row["budget"], row["agreement"], row["cache_bytes"]) == ("chunkkv", 0.25, 0.75, 1000)
    assert row["texts"]["b"] == {"perplexity": pytest.approx(np.exp(4.5)), "agreement": 0.5}


def test_the_table():
    measured = [
        {"policy": name, "budget": budget, "perplexity": ppl, "agreement": share, "cache_bytes": 5e6}
        for name, budget, ppl, share in [
            ("full", None, 20, 1.0),
            ("a", 0.125, 25.126, 0.8),
            ("a", 1.0, 20, 1.0),
            ("b", 1.0, 21, 0.9),
        ]
    ]
    assert tables.quality(measured).splitlines() == [
        "| policy | 12.5 % | 100 % |",
        "| --- | ---: | ---: |",
        "| `full` | 20.00, 100.0 %, 5 MB | 20.00, 100.0 %, 5 MB |",
        "| `a` | 25.13, 80.0 %, 5 MB | 20.00, 100.0 %, 5 MB |",
        "| `b` |  | 21.00, 90.0 %, 5 MB |",
    ]


@pytest.fixture
def script(tiny, monkeypatch, tmp_path):
    """Runs the script on the tiny model, which has no tokenizer: the texts' tokens are given."""
    out = tmp_path / "quality.json"
    tokens = dict(zip(("a.txt", "b.txt"), TEXTS, strict=True))
    monkeypatch.setattr(kvjax, "load", lambda model, dtype: tiny, raising=False)
    monkeypatch.setattr(models, "read_tokens", lambda params, path, count, skip: tokens[path.name][:count])

    def run(*options: str):
        sizes = ["--prompt", "60", "--scored", "20", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["policy_quality", "--text", "a.txt", "--text", "b.txt", *sizes, *options])
        policy_quality.main()
        return json.loads(out.read_text())

    return run


def test_the_script(script, tiny, capsys):
    result = script("--policies", "full,streaming_llm", "--budgets", "0.25,1.0")
    rows = result["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("full", None),
        ("streaming_llm", 0.25),
        ("streaming_llm", 1.0),
    ]
    assert rows[2]["perplexity"] == pytest.approx(rows[0]["perplexity"], rel=1e-5)
    assert rows[2]["agreement"] == 1 > rows[1]["agreement"]
    expected = continuation(tiny, TEXTS, 60, "streaming_llm", 0.25)
    assert rows[1]["texts"]["b"]["perplexity"] == pytest.approx(expected[1].scores.perplexity)
    assert result["header"]["settings"]["texts"] == ["a.txt", "b.txt"]
    assert tables.quality(rows) in capsys.readouterr().out


def test_bits_instead_of_budgets():
    policies = policy_quality.chosen(["kivi", "tova"], [0.5])
    assert [policy_quality.name(policy) for policy in policies] == [
        "kivi, 2 bits",
        "kivi, 4 bits",
        "kivi, 8 bits",
        "tova",
    ]


def test_what_cannot_work_is_told_first(script):
    with pytest.raises(kvjax.PolicyError, match="gives 0 slots"):
        script("--policies", "streaming_llm,chunkkv", "--budgets", "0.01")
