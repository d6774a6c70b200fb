"""Sizes that are planned are those that run: bytes of caches, budgets chosen by them, and what an interrupted run holds."""

import dataclasses
import json

import pytest

import kvjax
from kvjax.config import LongRope
from kvjax.evals import Example, MultiQuery, evaluate, runner, sessions
from kvjax.evals.compare import compare, markdown
from kvjax.evals.measure import prepare
from kvjax.evals.plan import Batch, Plan, make_batches
from kvjax.evals.task import Format
from kvjax.models import Params
from kvjax.policies import KVzip, PolicyError

WORDS = ("ab", "abc", "abd")


@dataclasses.dataclass(frozen=True)
class Words:
    """Contexts of two sizes with questions of several lengths. They make three batches."""

    name: str = "words"

    def examples(self, form):
        return [
            Example(f"{word} " * times, f"Say {word * (i + 1)}.", (word,), max_new_tokens=4, chat=False)
            for times in (12, 40)
            for i, word in enumerate(WORDS)
        ]

    def score(self, answer, example):
        return float(len(example.question) % 3 == 1)


@pytest.fixture
def held(monkeypatch):
    """Bytes per row of the caches that were really there, in order of the calls."""
    found, iterate = [], runner.iterate

    def watched(*args, rows, **options):
        answers = list(iterate(*args, rows=rows, **options))
        stats = answers[-1][1].stats
        assert stats.rows == len(answers) >= rows
        found.append([each / rows for each in (stats.cache_bytes + stats.host_cache_bytes, stats.full_cache_bytes)])
        return iter(answers)

    monkeypatch.setattr(runner, "iterate", watched)
    return found


@pytest.mark.parametrize(
    ("policy", "query_aware"),
    [
        ("full", False),
        ("h2o:24", False),
        ("pyramidkv:24,window=4", False),
        ("pyramidkv:24,window=4", True),
        ("snapkv:0.5,window=4", False),
        ("snapkv:0.5,window=4", True),
    ],
)
def test_planned_bytes_are_those_of_the_caches(talker, held, policy, query_aware):
    """Prompts contain the questions or not, which changes their lengths: of policies whose slots depend on them, both are tested."""
    policy = kvjax.get_policy(policy)
    ready = runner.prepare(talker, Words(), batch=2, query_aware=query_aware)
    found = ready.run(policy)
    assert len(held) == len(ready.plan.batches) >= 2
    for batch, (cache, full) in zip(ready.plan.batches, held, strict=True):
        planned = ready.plan.row_bytes(policy, batch)
        assert (planned["cache_bytes"] + planned["host_cache_bytes"], planned["full_cache_bytes"]) == (cache, full)
        assert {found.rows[i]["full_cache_bytes"] for i in batch.examples} == {full}
    assert found.cache_bytes == pytest.approx(ready.plan.bytes_held(policy))
    assert found.full_cache_bytes == pytest.approx(ready.plan.bytes_held(kvjax.Full()))


def test_planned_bytes_of_blocks(talker, held):
    policy = kvjax.get_policy("pyramidkv:48,window=4")
    ready = runner.prepare(talker, Words(), batch=1, prefill_block=32)
    ready.run(policy)
    planned = [ready.plan.row_bytes(policy, batch) for batch in ready.plan.batches]
    assert [each["cache_bytes"] for each in planned] == [cache for cache, _ in held]
    whole = dataclasses.replace(ready.plan, prefill_block=None)
    assert whole.bytes_held(policy) != ready.plan.bytes_held(policy)


@pytest.mark.parametrize("history", ["reference", "none"])
def test_planned_bytes_of_a_session(talker, tmp_path, monkeypatch, history):
    file = tmp_path / "contexts.jsonl"
    turns = [{"input": "What is ab?", "answer": "12"}, {"input": "And cd?", "answer": "345"}]
    file.write_text(json.dumps({"context": "ab is 12, cd is 345. " * 9, "multi_turns": turns}))
    held = []

    class Watched(kvjax.Session):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            held.append(self.cache_bytes)

    monkeypatch.setattr(sessions, "Session", Watched)
    found = evaluate(talker, MultiQuery(str(file), history, max_new_tokens=6), "snapkv:24,window=4")
    assert {row["cache_bytes"] for row in found.rows} == set(held)


@pytest.mark.filterwarnings("ignore:.* of the full cache's bytes")
@pytest.mark.parametrize(("policy", "share"), [("h2o", 0.5), ("tova", 0.75)])
def test_budgets_are_matched_by_what_runs(talker, policy, share):
    """Also where questions are short, and prompts of several lengths. `test_compare.py` has several policies and shares."""
    cells = compare(talker, [kvjax.get_policy(policy)], [share], [Words()], batch=2)
    assert [cell.target for cell in cells] == [None, share]
    for cell in cells:
        ready = prepare(talker, Words(), batch=2)
        policy = kvjax.get_policy(cell.outcome.policy, **cell.outcome.settings)
        assert cell.outcome.cache_bytes == pytest.approx(ready.plan.bytes_held(policy))
        assert cell.share <= (cell.target or 1)
        if cell.target is not None:
            larger = kvjax.get_policy(policy, budget=policy.budget + 32)
            assert ready.plan.bytes_held(larger) > cell.target * cells[0].outcome.full_cache_bytes


def test_standard_errors_and_counts(talker):
    scores = [Words().score("", example) for example in Words().examples(None)]
    assert 0 < sum(scores) < len(scores)
    (cell,) = compare(talker, [kvjax.Full()], [0.5], [Words()])
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    assert (cell.outcome.value, cell.outcome.count) == (mean, len(scores))
    assert cell.outcome.standard_error == pytest.approx((variance / len(scores)) ** 0.5)
    assert cell.row()["standard_error"] == cell.outcome.standard_error
    page = markdown([cell])
    assert "n = 6" in page
    assert f"{mean:.3f} ± {cell.outcome.standard_error:.3f} (100 %)" in page


def test_an_interrupted_run_holds_what_was_planned(talker, tmp_path):
    policy, out = kvjax.get_policy("h2o:24"), tmp_path / "words.jsonl"
    whole = evaluate(talker, Words(), policy, batch=3, out=out)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2] + lines[4:5]))
    again = evaluate(talker, Words(), policy, batch=3, out=out)
    timeless = [
        [{name: value for name, value in row.items() if "seconds" not in name} for row in each.rows]
        for each in (whole, again)
    ]
    assert timeless[0] == timeless[1]


def test_rotations_run_alone(talker):
    """`generate` would split a batch with two rotations of LongRoPE."""
    scaling = LongRope((1.0,) * 4, (2.0,) * 4, 80, factor=3.0)
    config = talker.config.with_attention(rope=dataclasses.replace(talker.config.rope, scaling=scaling))
    form = Format(talker.tokenizer)
    examples = [Example("a" * n, "b", ("c",), 4, chat=False) for n in (70, 76, 90, 72)]
    batches = make_batches(config, form, examples, 4, query_aware=False)
    assert [batch.examples for batch in batches] == [(0, 1, 3), (2,)]


def test_sizes_know_the_chat_template(talker: Params) -> None:
    """KVzip keeps the template's tokens, so budgets below their number do not work, in plans as in runs."""
    plan = Plan(talker, (Batch(300, 8, 2, (0, 1)),))
    with pytest.raises(PolicyError, match=r"the chat template's \d+ first tokens are always kept"):
        plan.bytes_held(KVzip(budget=5))
    assert plan.bytes_held(KVzip(budget=5, prefix=0)) < plan.bytes_held(KVzip(budget=128))
