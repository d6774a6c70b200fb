"""GSM8K's prompts from its own files, and what counts as the answer."""

import json

import pytest

from kvjax.evals import GSM8K, Example, Format


@pytest.fixture
def files(shared):
    folder = shared / "data/tasks/gsm8k"
    return {"file": str(folder / "test.jsonl"), "examples_file": str(folder / "train_first600.jsonl")}


def test_many_shots(talker, files):
    task = GSM8K(**files, shots=50, samples=200)
    examples = task.examples(Format(talker.tokenizer))
    assert len(examples) == 200
    (context,) = {example.context for example in examples}
    assert context.count("Question: ") == context.count("\nAnswer: ") == context.count("\n#### ") == 50
    with open(files["file"]) as lines:
        for line, example in zip(lines, examples, strict=False):
            row = json.loads(line)
            assert example.question == f"Question: {row['question']}\nAnswer:"
            assert example.answers == (row["answer"].split("#### ")[1].replace(",", ""),)
            assert task.score(row["answer"], example) == 1
            assert task.score(row["answer"] + "1", example) == 0
    other = GSM8K(**files, shots=50, samples=1, seed=1).examples(Format(talker.tokenizer))
    assert other[0].context != context


@pytest.mark.parametrize(
    ("answer", "flexible", "strict"),
    [
        ("so #### 1,234", 1, 1),
        ("#### $1234.00 and 7", 1, 1),
        ("she has 3, then 1,234.", 1, 0),
        ("1234 is not 5", 0, 0),
        ("nothing", 0, 0),
    ],
)
def test_the_number_that_counts(answer, flexible, strict):
    example = Example("", "?", ("1234",), 8)
    for extract, expected in (("flexible", flexible), ("strict", strict)):
        assert GSM8K("f", "g", extract=extract).score(answer, example) == expected


def test_what_is_no_gsm8k(talker, files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "?", "answer": "no number"}\n')
    with pytest.raises(ValueError, match="line 1: answer: does not end in #### NUMBER"):
        GSM8K(**files | {"file": str(bad)}).examples(Format(talker.tokenizer))
    with pytest.raises(ValueError, match="has 600 solved examples"):
        GSM8K(**files, shots=601).examples(Format(talker.tokenizer))
    with pytest.raises(ValueError, match="'flexible' or 'strict'"):
        GSM8K(**files, extract="loose")
