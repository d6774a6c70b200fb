"""Data that tasks are made from: a damaged line is refused with the file and the line, not read as something else."""

import json

import pytest

from kvjax.evals import GSM8K, Format, LongBench, evaluate, ruler
from kvjax.evals.longbench import metrics
from kvjax.evals.ruler.qa import read

PROBLEM = {"question": "1 + 1?", "answer": "so #### 2"}
ROW = {"context": "a\u2028b", "input": "?", "answers": ["yes"], "all_classes": None, "length": 3}


def gsm8k(form, file):
    return GSM8K(str(file), str(file), shots=1).examples(form)


def longbench(form, file):
    return LongBench("qasper", str(file)).examples(form)


DAMAGE = [
    (b'{"question": ', r"not JSON \(Expecting value at column 14\)"),
    (b"not JSON", "not JSON"),
    (b'"\xff"', "not UTF-8 text"),
    (b"[]", "input should be"),
    (b"null", "input should be"),
]


@pytest.mark.parametrize(
    ("read", "good", "line", "says"),
    [
        *((gsm8k, PROBLEM, line, says) for line, says in DAMAGE),
        *((longbench, ROW, line, says) for line, says in DAMAGE),
        (gsm8k, PROBLEM, {"question": "1 + 1?"}, "answer: field required"),
        (gsm8k, PROBLEM, PROBLEM | {"question": 1}, "question: input should be a valid string, not 1"),
        (gsm8k, PROBLEM, PROBLEM | {"answer": "no number"}, "answer: does not end in #### NUMBER"),
        (longbench, ROW, {**ROW, "answers": "yes"}, "answers: input should be a valid array"),
        (longbench, ROW, {**ROW, "answers": []}, "answers: list should have at least 1 item"),
        (longbench, ROW, {**ROW, "answers": [1]}, r"answers\.0: input should be a valid string"),
        (longbench, ROW, {**ROW, "context": None}, "context: input should be a valid string"),
        (longbench, ROW, {**ROW, "length": "3"}, "length: input should be a valid integer"),
        (longbench, ROW, {**ROW, "all_classes": 5}, "all_classes: input should be a valid array"),
    ],
)
def test_a_damaged_line_is_named(talker, tmp_path, read, good, line, says):
    file = tmp_path / "data.jsonl"
    whole = json.dumps(good, ensure_ascii=False).encode()
    bad = line if isinstance(line, bytes) else json.dumps(line).encode()
    file.write_bytes(whole + b"\n\n" + bad + b"\n" + whole + b"\n")
    with pytest.raises(ValueError, match=rf"data.jsonl, line 3: {says}"):
        read(Format(talker.tokenizer), file)


def test_what_is_said_of_a_large_line_is_short(talker, tmp_path):
    """The list has a wrong item in each place, and its text is as long as the file."""
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({**ROW, "answers": [1] * 1_000_000}))
    with pytest.raises(ValueError, match=r"^\S*data.jsonl, line 1: answers\.0: input should be a valid string, not 1$"):
        longbench(Format(talker.tokenizer), file)
    file.write_text(json.dumps([1] * 1_000_000))
    with pytest.raises(ValueError, match=r"input should be an object, not \[1, 1, 1, 1, 1, 1, \.\.\.\]$"):
        longbench(Format(talker.tokenizer), file)
    file.write_text(json.dumps({**ROW, "context": "a" * (1 << 24)}))
    with pytest.raises(ValueError, match=r"line 1: 167\d{5} bytes; a line has at most 16777216$"):
        longbench(Format(talker.tokenizer), file)


@pytest.mark.parametrize("read", [gsm8k, longbench])
@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_rows(talker, tmp_path, read, content):
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data.jsonl: no rows"):
        read(Format(talker.tokenizer), file)


def test_editors_of_windows_are_welcome(talker, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(ROW, ensure_ascii=False).encode()] * 2) + b"\r\n")
    examples = longbench(Format(talker.tokenizer), file)
    assert len(examples) == 2
    assert "a\u2028b" in examples[0].context


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"{}", "neither of SQuAD's form nor of HotpotQA's .data: field required"),
        (b"5", "neither of SQuAD's form"),
        (
            b'{"data": [{"paragraphs": [{"context": "c", "qas": ["x"]}]}]}',
            r"data.0.paragraphs.0.qas.0: input should be",
        ),
        (b'{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": []}]}]}]}', "has no answer"),
        (b'[{"question": "q", "answer": 1, "context": []}]', "0.answer: input should be a valid string, not 1"),
        (b'[{"question": "q", "answer": "a", "context": [["title"]]}]', "0.context.0"),
    ],
)
def test_questions_in_one_document(tmp_path, content, says):
    file = tmp_path / "questions.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"questions.json: .*{says}"):
        read(str(file))
    with pytest.raises(ValueError, match=r"questions.json: "):
        ruler.ruler("qa_1", 100, 1, file=str(file))


def test_a_package_that_scoring_needs_is_missed_before_a_model_answers(letters, tmp_path, monkeypatch):
    def missing():
        raise ImportError("LongBench's scoring of Chinese needs jieba")

    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(ROW))
    monkeypatch.setattr(metrics, "_jieba", missing)
    monkeypatch.setattr(LongBench, "examples", lambda *args: pytest.fail("its examples were made"))
    with pytest.raises(ImportError, match="LongBench's scoring of Chinese needs jieba"):
        evaluate(letters, LongBench("multifieldqa_zh", str(file)), "full")
