"""Many questions of one context: what each of them follows, and that the context is compressed once."""

import json

import pytest

import kvjax
from kvjax.evals import Format, MultiQuery, evaluate, sessions
from kvjax.evals.measure import prepare
from kvjax.evals.tasks import Inputs
from kvjax.policies import get_policy

ROWS = [
    {
        "id": 0,
        "context": "Keys and values: ab is 12, cd is 345, ef is 6. " * 3,
        "multi_turns": [
            {"input": "What is ab?", "answer": "12"},
            {"input": "And what is cd?", "answer": ["345", "cd"]},
            {"input": "And ef?", "answer": 6},
        ],
    },
    {"context": "One is 1. " * 9, "multi_turns": [{"input": "One?", "answer": "1"}]},
]
NEW = 6


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "contexts.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


@pytest.fixture
def begun(monkeypatch):
    """How often a context was read."""
    prompts = []

    class Counted(kvjax.Session):
        def __init__(self, params, prompt, *args, **options):
            prompts.append(prompt)
            super().__init__(params, prompt, *args, **options)

    monkeypatch.setattr(sessions, "Session", Counted)
    return prompts


def references(turn):
    answer = turn["answer"]
    return ", ".join(answer) if isinstance(answer, list) else str(answer)


@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("history", ["reference", "none"])
def test_what_a_question_follows(talker, file, begun, history, chat):
    """With everything kept, each answer is that of a prompt which has in it all that came before."""
    found = evaluate(talker, MultiQuery(file, history, max_new_tokens=NEW), chat=chat)
    assert len(begun) == 2
    assert [row["labels"] for row in found.rows] == [{"turn": 0}, {"turn": 1}, {"turn": 2}, {"turn": 0}]
    rows = iter(found.rows)
    for source in ROWS:
        said = []
        for turn in source["multi_turns"]:
            row, parts = next(rows), [*(text for pair in said for text in pair), turn["input"]]
            parts[0] = f"{source['context']}\n\n{parts[0]}"
            if chat:
                roles = ["user", "assistant"] * len(parts)
                prompt = [{"role": role, "content": text} for role, text in zip(roles, parts, strict=False)]
            else:
                prompt = parts[0] + "".join(f"{a}\n\n{q}" for a, q in zip(parts[1::2], parts[2::2], strict=True))
            expected = kvjax.generate(talker, prompt, max_new_tokens=NEW)
            assert (row["answer"], row["new_tokens"]) == (expected.text, len(expected.tokens))
            if history == "reference":
                said.append((turn["input"], references(turn)))


def test_what_is_read_between_questions(talker, file, monkeypatch):
    """Of reference answers, each but the last, behind its question."""
    reads, read = [], kvjax.Session.read
    monkeypatch.setattr(kvjax.Session, "read", lambda session, ids: (reads.append(list(ids)), read(session, ids)))
    evaluate(talker, MultiQuery(file, max_new_tokens=NEW, samples=1), chat=False)
    assert reads == [
        [
            id
            for text in (f"\n\n{turn['input']}", references(turn))
            for id in talker.tokenizer.encode(text, add_special=False)
        ]
        for turn in ROWS[0]["multi_turns"][:-1]
    ]


def test_its_own_answers_in_a_chat(talker, file, begun):
    found = evaluate(talker, MultiQuery(file, "own", max_new_tokens=NEW, samples=1), chat=True)
    context, (first, *rest) = ROWS[0]["context"], [turn["input"] for turn in ROWS[0]["multi_turns"]]
    session = kvjax.Session(talker, [{"role": "user", "content": f"{context}\n\n{first}"}], max_new_tokens=512)
    answers = [session.answer(NEW), *(session.chat(question, NEW) for question in rest)]
    assert [row["answer"] for row in found.rows] == [answer.text for answer in answers]


def test_its_own_answers_in_a_text(talker, file, begun):
    found = evaluate(talker, MultiQuery(file, "own", max_new_tokens=NEW, samples=1), chat=False)
    ids, encode = talker.tokenizer.encode(ROWS[0]["context"]), talker.tokenizer.encode
    for row, turn in zip(found.rows, ROWS[0]["multi_turns"], strict=True):
        ids += encode(f"\n\n{turn['input']}", add_special=False)
        expected = kvjax.generate(talker, ids, max_new_tokens=NEW)
        assert row["answer"] == expected.text
        ids += expected.tokens


def asked(talker, context, turn):
    """A session reads its prompt's last token after compression, like a question."""
    return [context[-1], *talker.tokenizer.encode(f"\n\n{turn['input']}", add_special=False)]


def test_questions_by_themselves_as_the_runner_asks_them(talker, file, begun):
    """Of a compressed context each gets what it would get alone, and the bytes are those of one cache."""
    policy = get_policy("streaming_llm", budget=24)
    found = evaluate(talker, MultiQuery(file, "none", max_new_tokens=NEW, samples=1), policy, chat=False)
    assert len(begun) == 1
    for row, turn in zip(found.rows, ROWS[0]["multi_turns"], strict=True):
        alone = kvjax.generate(
            talker, begun[0][:-1], policy, max_new_tokens=NEW, question=asked(talker, begun[0], turn)
        )
        assert row["question_tokens"] == alone.stats.question_tokens - 1
        assert row["answer"] == alone.text
    assert len({row["cache_bytes"] for row in found.rows}) == 1
    assert 0 < found.cache_bytes < found.full_cache_bytes
    assert {row["host_cache_bytes"] for row in found.rows} == {0}


@pytest.mark.slow
def test_bytes_in_the_hosts_memory(talker, file):
    """All keys and values are there; positions and weights of slots are not."""
    found = evaluate(talker, MultiQuery(file, "none", max_new_tokens=NEW, samples=1), "offloaded(quest:16)", chat=False)
    row = found.rows[0]
    assert row["cache_bytes"] > 0
    assert 0.8 < row["host_cache_bytes"] / row["full_cache_bytes"] < 1


@pytest.mark.parametrize(
    ("score_by", "answer", "scores"),
    [
        ("any", "It is 345 or 12", [1, 1, 0]),
        ("all", "It is 345 or 12", [1, 1 / 2, 0]),
        ("number", "It is 345, then 12", [0, 1, 0]),
        ("f1", "12", [1, 0, 0]),
    ],
)
def test_scores(talker, file, score_by, answer, scores):
    task = MultiQuery(file, score_by=score_by, samples=1)
    assert [task.score(answer, example) for example in task.examples(Format(talker.tokenizer))] == scores


def test_an_interrupted_run_goes_on(talker, file, begun, tmp_path):
    task, out = MultiQuery(file, max_new_tokens=NEW), tmp_path / "results.jsonl"
    whole = evaluate(talker, task, out=out)
    lines = out.read_text().splitlines()
    out.write_text("\n".join([*lines[:2], *lines[3:], ""]))
    again = evaluate(talker, task, out=out)
    assert [row["answer"] for row in again.rows] == [row["answer"] for row in whole.rows]
    assert len(begun) == 3


def test_how_long_its_sequences_become(talker, file):
    context, questions, _ = sessions.plan(
        Format(talker.tokenizer), MultiQuery(file, samples=1, max_new_tokens=NEW).examples(Format(talker.tokenizer))
    )
    new = sum(map(len, questions)) + NEW * len(questions) + 1  # the second reference answer, "345, cd", has seven bytes
    inputs = Inputs(data=file, max_new_tokens=NEW, samples=1)
    (batch,) = prepare(talker, "multi-query", inputs, chat=False).plan.batches
    # The context's last token is read after the others are compressed.
    assert (batch.prompt, batch.new_tokens) == (len(context) - 1, new + 1)


def test_what_is_refused(talker, file, tmp_path):
    with pytest.raises(ValueError, match="asks many questions of a context"):
        evaluate(talker, MultiQuery(file), query_aware=True)
    for settings in ({"history": "all"}, {"score_by": "bleu"}, {"samples": 0}, {"turns": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            MultiQuery(file, **settings)
    bad = tmp_path / "bad.jsonl"
    for content, says in (
        ('{"context": "c", "multi_turns": []}', "multi_turns: list should have at least 1 item"),
        ('{"context": "c", "multi_turns": [{"input": "q", "answer": []}]}', "multi_turns.0.answer"),
        ('{"context": "c", "multi_turns": [{"input": "q", "answer": ["1", ""]}]}', "multi_turns.0.answer"),
        ('{"context": "c", "multi_turns": [{"input": "q", "answer": ""}]}', "should have at least 1 character"),
        ('{"multi_turns": [{"input": "q", "answer": 1}]}', "context: field required"),
    ):
        bad.write_text(content)
        with pytest.raises(ValueError, match=says):
            MultiQuery(str(bad)).check()
