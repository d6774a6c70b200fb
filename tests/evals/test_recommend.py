"""Recommendations: what is measured on texts and tasks, what follows from known scores, and that runs resume."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.evals import Example, recommend
from kvjax.evals.following import following
from kvjax.evals.recommend import Contender, Recommendation, shortlist
from kvjax.evals.tasks import Inputs
from kvjax.models import Params
from kvjax.plots import tradeoff
from kvjax.policies import Full, KNorm, PolicyError, StreamingLLM, get_policy

SMALL = ["streaming_llm:sinks=1", "keydiff"]
LENGTH, WINDOWS = 208, 8


@pytest.fixture
def book(tmp_path: Path) -> Inputs:
    """A text of nine windows."""
    file = tmp_path / "book.txt"
    file.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 9 * LENGTH + 3)))
    return Inputs(text=file, lengths=(LENGTH,), samples=WINDOWS)


@pytest.mark.slow
def test_a_text(letters: Params, book: Inputs, tmp_path: Path) -> None:
    out, titles = tmp_path / "out", list[str]()

    def report(title: str) -> Callable[[int, int], None]:
        titles.append(title)
        return lambda done, total: None

    found = recommend.recommend(letters, None, book, ratio=0.6, policies=SMALL, out=out, batch=2, report=report)
    assert [len(each.scores) for each in found.contenders] == [8, 8, 4, 4]
    assert sorted((each.policy.info.name, each.target) for each in found.contenders) == [
        (name, target) for name in ("keydiff", "streaming_llm") for target in (0.3, 0.6)
    ]
    assert all(each.share <= each.target * 1.02 for each in found.contenders if each.target)
    assert [title.rpartition(" · ")[2] for title in titles] == ["4 of 8"] * 4 + ["8 of 8"] * 3
    for each in (found.full, found.contenders[0], found.contenders[-1]):
        check_scores(letters, book, each)

    content = json.loads((out / "recommendation.json").read_text())
    assert content["verdict"] == found.verdict()
    assert [row["value"] for row in content["rows"]] == [each.score for each in (found.full, *found.contenders)]
    files = {file: file.read_bytes() for file in out.glob("*.jsonl")}
    assert len(files) == 5
    again = recommend.recommend(letters, None, book, ratio=0.6, policies=SMALL, out=out, batch=2)
    assert again == found
    assert {file: file.read_bytes() for file in out.glob("*.jsonl")} == files


def check_scores(params: Params, book: Inputs, each: Contender) -> None:
    """The mean log-probability of the last 16 of 208 tokens, from what the policy kept of the others."""
    assert book.text is not None
    tokens = params.tokenizer.encode(book.text.read_text())
    windows = [tokens[i * LENGTH : (i + 1) * LENGTH] for i in np.random.default_rng(0).permutation(9)[:WINDOWS]]
    pairs = [(window[:-16], window[-16:]) for window in windows[: len(each.scores)]]
    want = [found.logprob / 16 for found in following(params, each.policy, pairs, batch=2)]
    np.testing.assert_allclose(each.scores, want, rtol=1e-5)


def test_an_interrupted_text_resumes(letters: Params, book: Inputs, tmp_path: Path) -> None:
    """Within a batch, too: its windows run again, and those that are known are not written twice. And with more windows."""
    measure = recommend._Text.of(letters, book, decoding=False, batch=3, mesh=None)
    file = tmp_path / "full.jsonl"
    whole = measure.scores(Full(), 8, file, None)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))
    assert measure.scores(Full(), 4, file, None) == whole[:4]
    assert measure.scores(Full(), 8, file, None) == whole
    assert file.read_text() == "".join(lines)
    more = dataclasses.replace(book, samples=9)
    assert (
        recommend._Text.of(letters, more, decoding=False, batch=3, mesh=None).scores(Full(), 9, file, None)[:8] == whole
    )
    file.write_text("".join([lines[0], lines[2]]))
    with pytest.raises(ValueError, match="window 1 in place of 0"):
        measure.scores(Full(), 8, file, None)


def test_decoding_predicts_more_than_it_compresses(letters: Params, book: Inputs) -> None:
    found = recommend._Text.of(letters, book, decoding=True, batch=2, mesh=None)
    assert {(len(context), len(continuation)) for context, continuation in found.pairs} == {(16, 192)}


@dataclasses.dataclass(frozen=True)
class Questions:
    """A task whose examples are alone or in sessions of two. Answers are as good as their first letter is early."""

    name: str = "questions"

    def examples(self, form: Any) -> Sequence[Example]:
        return [
            Example("abcdefgh " * 4, f"q{i} ", ("a",), max_new_tokens=2, chat=False, session=i // 2 if i < 4 else None)
            for i in range(8)
        ]

    def score(self, answer: str, example: Example) -> float:
        return 1 - "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ".find(answer[:1] or "a") / 62


def test_a_task_with_sessions(letters: Params, tmp_path: Path) -> None:
    """Sessions have one score. Of a session, the questions that are wanted are written, and no others are answered twice."""
    measure = recommend._Answers.of(letters, Questions(), Inputs(), batch=2)
    assert (measure.name, measure.metric, measure.count) == ("questions", "score", 6)
    file, progress = tmp_path / "full.jsonl", list[tuple[int, int]]()
    found = measure.prepared.run(Full(), file, lambda *done: progress.append(done), only=[1, 4, 6])
    assert [row["example"] for row in found.rows] == [1, 4, 6]
    assert progress == [(i, 3) for i in range(4)]
    whole = measure.scores(Full(), 6, file, None)
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert sorted(row["example"] for row in rows) == list(range(8))
    scores = {row["example"]: row["score"] for row in rows}
    units = [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]
    want = [float(np.mean([scores[i] for i in units[unit]])) for unit in np.random.default_rng(0).permutation(6)]
    assert whole == want
    assert measure.scores(Full(), 2, file, None) == want[:2]


@pytest.mark.slow
def test_a_task(letters: Params, tmp_path: Path) -> None:
    found = recommend.recommend(letters, Questions(), ratio=0.6, policies=["streaming_llm"], out=tmp_path, batch=2)
    assert (found.task, found.metric, len(found.full.scores)) == ("questions", "score", 6)
    assert {each.policy.info.name for each in found.contenders} == {"streaming_llm"}


def test_the_shortlist_holds_the_limit(letters: Params, book: Inputs) -> None:
    measure = recommend._Text.of(letters, book, decoding=False, batch=2, mesh=None)
    full = measure.plan.bytes_held(Full())
    policies = [StreamingLLM(), KNorm(), get_policy("kivi"), get_policy("snapkv")]
    found, excluded = shortlist(policies, measure.plan, full, 0.12)
    assert [each.policy.info.name for each in found] == []
    assert set(excluded) == {str(policy) for policy in policies}
    assert excluded["kivi"].startswith("holds ")
    assert excluded[str(KNorm())].startswith("needs at least ")
    for each in shortlist(policies, measure.plan, full, 0.7)[0]:
        assert each.cache_bytes == measure.plan.bytes_held(each.policy) <= 0.7 * 1.02 * full
        assert each.target in (0.7, 0.35, None)
    with pytest.raises(PolicyError, match=r"no policy can hold 12.0 %.*kivi holds .*Raise the limit"):
        recommend.recommend(letters, None, book, ratio=0.12, policies=policies, batch=2)


def contender(name: str, scores: Sequence[float], share: float = 0.25) -> Contender:
    return Contender(get_policy(name), None if name == "full" else 0.25, 100 * share, 100, tuple(scores))


def recommendation(*contenders: Contender) -> Recommendation:
    full = contender("full", np.linspace(0.4, 1.0, 20), share=1.0)
    return Recommendation("vt", "score", 0.25, contenders, full, {})


def test_a_significant_difference() -> None:
    from scipy import stats

    random = np.random.default_rng(1)
    best, other = np.linspace(0.3, 0.9, 20), np.linspace(0.3, 0.9, 20) - 0.1 + random.normal(0, 0.05, 20)
    found = recommendation(contender("snapkv:64", best), contender("knorm:64", other), contender("tova:64", [0.1] * 5))
    difference, interval = found.best.above(found.contenders[1])
    low, high = stats.ttest_rel(best, other).confidence_interval(0.95)
    assert (difference - interval, difference + interval) == (pytest.approx(low), pytest.approx(high))
    assert found.equals == ()
    first, second, third = found.verdict().splitlines()
    assert first == (
        f"Use snapkv:budget=64: 0.600 ± {found.best.interval:.3f} with 25.0 % of the full cache's bytes (n = 20)."
    )
    assert second == f"It is better than knorm:budget=64 (difference {difference:+.3f} ± {interval:.3f})."
    # The same difference for each example: the interval is that of ties.
    assert third.startswith(
        "No significant difference between snapkv:budget=64 and the full cache (difference -0.100 ±"
    )


def test_no_significant_difference() -> None:
    random = np.random.default_rng(1)
    one, two = random.uniform(0, 1, 20), random.uniform(0, 1, 20)
    found = recommendation(contender("snapkv:64", one), contender("knorm:64", two))
    assert [str(each.policy) for each in found.equals] == ["knorm:budget=64"]
    first, second, third, fourth = found.verdict().splitlines()
    assert first.startswith("No significant difference between snapkv:budget=64 and knorm:budget=64 (difference ")
    assert first.endswith(", n = 20).")
    assert second.startswith("snapkv:budget=64: ")
    assert third.startswith("knorm:budget=64: ")
    assert "the full cache" in fourth


def test_rows_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    found = recommendation(contender("snapkv:64", [0.5] * 20), contender("knorm:64", [0.25] * 20, share=0.2))
    assert [(row["policy"], row["value"]) for row in found.rows()[1:]] == [("snapkv", 0.5), ("knorm", 0.25)]
    tradeoff(found.rows())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give the limit as either ratio or memory"),
        ({"ratio": 0.5, "memory": 10}, "give the limit as either ratio or memory"),
        ({"ratio": 1.0}, "the limit is 100.0 % of the full cache's .* bytes per sequence"),
        ({"memory": 1 << 20}, "The full cache needs no policy"),
        ({"ratio": 0.5, "query_aware": True}, "query_aware=True needs a task with questions"),
        ({"ratio": 0.5, "inputs": Inputs()}, "no task and no text to measure"),
        ({"ratio": 0.5, "task": "fidelity"}, "fidelity has no examples to compare; leave the task out"),
        ({"ratio": 0.5, "length": 1000}, "the text has 1875 tokens, which is less than two windows of 1000"),
    ],
)
def test_other_arguments_are_refused(letters: Params, book: Inputs, options: dict[str, Any], says: str) -> None:
    given = dict(options)
    if "length" in given:
        book = dataclasses.replace(book, lengths=(given.pop("length"),))
    with pytest.raises(ValueError, match=says):
        recommend.recommend(letters, **{"inputs": book, "policies": ["knorm"], **given})


def test_default_lists_are_policies() -> None:
    for names in (recommend.AGNOSTIC, recommend.AWARE, recommend.DECODING):
        assert len({get_policy(name) for name in names}) == len(names)
