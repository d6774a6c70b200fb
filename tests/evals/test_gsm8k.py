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


SPELLED = [
    r"#### 1. Find the eggs\n16-3-4=9\n\n#### 2. Multiply\n9*2=18\n\n\boxed{%s}".replace(r"\n", "\n"),
    "#### 1. Find the eggs\n16-3-4=9\n\n**Answer: %s**",
    "#### 1. Find the eggs\n16-3-4=9\n#### %s\n",
    r"\boxed{%s \text{ ft}^2}",
    r"\boxed{%s m^{2}}",
    r"\boxed{%s \text{ apples in 2 days}}",
    r"\boxed{%s apples in 2 days}",
    r"\boxed{%s miles/hour}",
    r"\boxed{\$%s}",
    r"\boxed{\$%s.00}",
    r"\boxed{%s\%%}",
    r"\boxed{%s.}",
    r"\boxed{6 \times 3 = %s}",
    r"\boxed{\text{Janet makes \$%s}}",
    r"\boxed{\textbf{%s}}",
]
"""Right answers of models that are asked for a box."""


@pytest.mark.parametrize("spelled", SPELLED)
def test_right_answers_count(shared, spelled):
    """For all references of the test set; an answer that is off by one is wrong."""
    task = GSM8K("f", None, shots=0)
    for line in (shared / "data/tasks/gsm8k/test.jsonl").read_text().splitlines()[::7]:
        number = json.loads(line)["answer"].split("#### ")[1].replace(",", "")
        example = Example("", "?", (number,), 8)
        assert task.score(spelled % number, example) == 1
        assert task.score(spelled % (int(float(number)) + 1), example) == 0


@pytest.mark.parametrize("separator", [",", "{,}", ",\\!", "\\,", "\\ ", "\\;", "{\\,}", "~", "\u202f"])
def test_thousands(separator):
    example = Example("", "?", ("1234567",), 8)
    number = f"{1234567:,}".replace(",", separator)
    for task in (GSM8K("f", None, shots=0), GSM8K("f", "g")):
        for text in (f"so \\boxed{{{number}}}", f"so\n#### {number}", f"so it is {number} dollars"):
            assert task.score(text, example) == 1
    assert GSM8K("f", None, shots=0).score(r"\boxed{1 234 567}", example) == 1
    assert GSM8K("f", "g").score("in 1999 1 234 567", example) == 0, "numbers of a sentence"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### .5", ".5"),
        ("#### 0.5", ".5"),
        ("it is \N{MINUS SIGN}5", "-5"),
        ("$-5", "-5"),
        ("-$5.", "-5"),
        ("9-5 is 4", "4"),
    ],
)
def test_small_and_negative_numbers(answer, number):
    assert GSM8K("f", "g").score(answer, Example("", "?", (number,), 8)) == 1


def test_after_examples_the_first_mark_counts():
    """Base models go on with problems of their own."""
    example = Example("", "?", ("18",), 8)
    assert GSM8K("f", "g").score("9*2=18\n#### 18\n\nProblem: ...\n#### 7", example) == 1
    assert GSM8K("f", "g").score("#### 18 eggs, \\boxed{7}", example) == 1
    assert GSM8K("f", None, shots=0).score("#### 18\nor rather \\boxed{7}", example) == 0
    assert GSM8K("f", None, shots=0, extract="strict").score("#### 1. Find\n18", example) == 0


def test_what_is_no_gsm8k(talker, files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "?", "answer": "no number"}\n')
    with pytest.raises(ValueError, match="line 1: answer: does not end in #### NUMBER"):
        GSM8K(**files | {"file": str(bad)}).examples(Format(talker.tokenizer))
    with pytest.raises(ValueError, match="has 600 solved examples"):
        GSM8K(**files, shots=601).examples(Format(talker.tokenizer))
    with pytest.raises(ValueError, match="'flexible' or 'strict'"):
        GSM8K(**files, extract="loose")
