"""Needles stand where they should, in as much hay as fits; runs of a task batch, resume, and know or do not know the question."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.evals import Example, Format, NeedleInAHaystack, evaluate, haystack, runner
from kvjax.plots import needle_map

TEXT = (Path(__file__).parents[2] / "docs" / "loomings.txt").read_text()
KINDS = ("number", "uuid", "passkey", "sentence")
SMALL = NeedleInAHaystack(lengths=(300, 340), depths=(0.0, 0.5, 1.0), samples=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [None, TEXT], ids=["noise", "text"])
def test_needles_stand_at_their_depths(talker, kind, text):
    form = Format(talker.tokenizer)
    task = NeedleInAHaystack((1000, 2000), (0.0, 0.3, 1.0), kind, samples=9, text=text)
    examples = task.examples(form)
    assert len(examples) == 2 * 3 * 9
    longest = max(map(len, haystack.sentences(haystack.NOISE if text is None else text))) + 1
    for example in examples:
        length, depth = example.labels["length"], example.labels["depth"]
        assert length - longest <= form.count(example) <= length
        hay = example.context.split("\n\n")[1]
        first, last = hay.index(example.answers[0]), hay.rindex(example.answers[-1])
        if depth == 0:
            assert first < 60
        elif depth == 1:
            assert last > len(hay) - 60
        else:
            assert task.score(hay, example) == 1
    assert len({example.context for example in examples}) > (6 if kind != "sentence" or text else 5)


def test_scores_are_shares_of_facts(talker):
    task = NeedleInAHaystack((600,), (0.5,), "sentence")
    (example,) = task.examples(Format(talker.tokenizer))
    assert task.score("EAT A SANDWICH on a sunny day", example) == pytest.approx(2 / 3)


@pytest.mark.parametrize("chat", [False, True])
def test_the_same_tokens_whether_or_not_the_question_is_known(talker, chat):
    """Context and question are tokenised apart and make up the whole prompt."""
    form = Format(talker.tokenizer, chat)
    for example in SMALL.examples(form):
        context, question = form.encode(example)
        before, after = (talker.tokenizer.decode(part, skip_special=False) for part in (context, question))
        opening, closing = ("<|user|>", "</s>\n<|assistant|>") if chat else ("", " ")
        assert before == opening + example.context
        assert after == example.question + closing + example.prefix.strip()


@pytest.mark.parametrize("question", ["assistant", "\N{OBJECT REPLACEMENT CHARACTER}", " who?\n", "user"])
def test_questions_may_be_any_text(talker, question):
    """Such as what the template has too."""
    form = Format(talker.tokenizer, True)
    example = Example("The facts. ", question, ("so",), 4)
    context, following = (talker.tokenizer.decode(part, skip_special=False) for part in form.encode(example))
    lead = question.removesuffix(question.lstrip())
    assert context == "<|user|>The facts. " + lead
    assert following == f"{question.strip()}</s>\n<|assistant|>"
    after = talker.tokenizer.decode(form.encode_next(example), skip_special=False)
    assert after == f"</s>\n<|user|>{question.strip()}</s>\n<|assistant|>"


@pytest.fixture(scope="module")
def blind(talker):
    return evaluate(talker, SMALL, kvjax.StreamingLLM(budget=64), chat=False)


def test_results_say_what_was_run(talker, blind):
    settings = blind.header["settings"]
    assert settings["task"]["name"] == "needle-number"
    assert settings["policy"]["budget"] == 64
    assert (settings["query_aware"], settings["chat"]) == (False, False)
    assert settings["model"].startswith("llama-2x4x2x8-")
    assert len(blind.rows) == 6
    assert [row["labels"]["depth"] for row in blind.rows] == [0.0, 0.5, 1.0] * 2
    for row in blind.rows:
        held = kvjax.StreamingLLM(budget=64).nbytes(
            talker.config, 1, row["context_tokens"], 88, talker.dtype
        )  # 64 for the padded question, 24 for the answer
        assert row["cache_bytes"] == held < row["full_cache_bytes"]
    assert blind.by("depth").keys() == {0.0, 0.5, 1.0}
    assert blind.score == np.mean([row["score"] for row in blind.rows])


def test_interrupted_runs_resume(talker, blind, tmp_path, monkeypatch):
    """The run is interrupted after three answers; half a line is left behind; the next run does only what is missing."""
    out, policy, calls = tmp_path / "needle.jsonl", kvjax.StreamingLLM(budget=64), []
    run = runner.Prepared._answers

    def failing(prepared, *args):
        calls.append([])
        for i, answer in run(prepared, *args):
            if len(calls) == 1 and len(calls[0]) == 3:
                raise KeyboardInterrupt
            calls[-1].append(i)
            yield i, answer

    monkeypatch.setattr(runner.Prepared, "_answers", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(talker, SMALL, policy, chat=False, out=out)
    with out.open("a") as file:
        file.write('{"example": 5, "sco')
    seen = []
    with pytest.warns(UserWarning, match="cut short"):
        resumed = evaluate(talker, SMALL, policy, chat=False, out=out, progress=lambda *done: seen.append(done))
    assert seen[0] == (3, 6)
    assert sorted(calls[0] + calls[1]) == list(range(6))
    assert [row["answer"] for row in resumed.rows] == [row["answer"] for row in blind.rows]
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 7
    again = evaluate(talker, SMALL, policy, chat=False, out=out)
    assert again.rows == resumed.rows
    assert calls[2:] in ([], [[]])
    with pytest.raises(ValueError, match=r"holds results of another run .*query_aware"):
        evaluate(talker, SMALL, policy, chat=False, query_aware=True, out=out)
    with pytest.raises(ValueError, match="policy"):
        evaluate(talker, SMALL, policy, budget=32, chat=False, out=out)
    other = tmp_path / "other.txt"
    other.write_text("something else\n")
    with pytest.raises(ValueError, match="not a result file"):
        evaluate(talker, SMALL, policy, chat=False, out=other)


def test_heat_map():
    rows = [
        {"score": score, "labels": {"length": length, "depth": depth}}
        for length, depth, score in [(100, 0.0, 1.0), (100, 0.0, 0.0), (200, 0.0, 1.0), (100, 1.0, 0.25)]
    ]
    panel = needle_map(rows).axes[0]
    np.testing.assert_array_equal(np.asarray(panel.images[0].get_array().filled(-1)), [[0.5, 1.0], [0.25, -1]])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["100", "200"]
    with pytest.raises(ValueError, match="no results"):
        needle_map([])


@pytest.mark.parametrize(
    ("options", "says"),
    [({"kind": "fork"}, "number, uuid"), ({"depths": (1.5,)}, "from 0 to 1"), ({"samples": 0}, "one or more of each")],
)
def test_what_is_no_needle_task(options, says):
    with pytest.raises(ValueError, match=says):
        NeedleInAHaystack(**options)


def test_what_cannot_be_run(talker, tiny):
    with pytest.raises(ValueError, match="no tokenizer"):
        evaluate(tiny, SMALL)
    with pytest.raises(ValueError, match="cannot hold the shortest example"):
        evaluate(talker, dataclasses.replace(SMALL, lengths=(100,)))
