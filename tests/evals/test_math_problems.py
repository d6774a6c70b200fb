r"""Competition problems: what counts as the answer, and which spellings of a value are the same."""

import importlib.util
import json
import random
import threading

import pytest

from kvjax.evals import GSM8K, Example, Format, MathProblems, math_answers
from kvjax.evals.math_answers import equals, last_box

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="comparing answers is in the `eval` extra"
)

PROBLEMS = [
    {"problem": "Half of one?", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"},
    {
        "problem": "Convert to polar.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
    },
]


@pytest.mark.parametrize(
    ("solution", "reference", "flexible", "strict"),
    [
        (r"so \boxed{\frac{1}{2}}.", "0.5", 1, 1),
        (r"so \boxed{\dfrac12}", r"\frac{1}{2}", 1, 1),
        (r"so $\boxed{\left(3,\frac{\pi}{2}\right)}$", r"\left( 3, \frac{\pi}{2} \right)", 1, 1),
        (r"\boxed{(\frac{\pi}{2}, 3)}", r"\left( 3, \frac{\pi}{2} \right)", 0, 0),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}", 1, 1),
        (r"\boxed{-p+q}", r"q - p", 1, 1),
        (r"\boxed{q+p}", r"q - p", 0, 0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1, 1),
        (r"\boxed{Edward}", r"\text{Evelyn}", 0, 0),
        (r"\boxed{\$32,\!348}", r"\$32,348", 1, 1),
        (r"\boxed{2, 1}", "1, 2", 1, 1),
        (r"\boxed{x = 5}", "5", 1, 1),
        (r"first \boxed{4}, but then \boxed{3}", "3", 1, 1),
        (r"first \boxed{4}, but then \boxed{3}", "4", 0, 0),
        (r"<think>\boxed{4}</think> It is \boxed{3}.", "3", 1, 1),
        (r"<think>\boxed{3}</think> I do not know.", "3", 0, 0),
        (r"<think>Perhaps \boxed{3}, but", "3", 0, 0),
        (r"<think>\boxed{4}</think> It is \boxed{3}. <think>Or \boxed{5}", "3", 1, 1),
        (r"Thus \boxed{3} is <b>right</b>.", "3", 1, 1),
        (r"\boxed{3", "3", 0, 0),
        (r"first \boxed{4}, so $\boxed7$.", "7", 1, 1),
        (r"so \boxed 12.", "12", 1, 1),
        (r"so $\boxed -3$", "-3", 1, 1),
        (r"\fbox 2.5, of course", r"\frac{5}{2}", 1, 1),
        (r"so $\boxed\frac{1}{2}$, not 3", "0.5", 1, 1),
        (r"so $\boxed\frac12$, not 3", "0.5", 1, 1),
        (r"so $\boxed\pi$", r"\pi", 1, 1),
        (r"so $\boxed x$", "x", 1, 1),
        (r"\boxed{4} and \boxed", "4", 1, 1),
        (r"\boxed{4} is what I boxed: the \boxed answer", "4", 1, 1),
        ("Therefore the answer is 042.", "42", 1, 0),
        ("12 apples and then 42", "42", 1, 0),
        (r"we have $\frac{1}{2}$", "0.5", 1, 0),
        ("nothing at all", "42", 0, 0),
        (r"\boxed{10\,080}", "10080", 1, 1),
        (r"\boxed{10\ 080}", "10080", 1, 1),
        (r"\boxed{10~080}", "10080", 1, 1),
        (r"\boxed{10 080}", "10080", 1, 1),
        (r"\boxed{10{,}080}", "10080", 1, 1),
        (r"it is $10\,080$", "10080", 1, 0),
        (r"\boxed{42.}", "42", 1, 1),
        (r"\boxed{11 5/6}", r"\frac{71}{6}", 1, 1),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2006!}", 1, 1),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0, 0),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0, 0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1, 1),
        (r"\boxed{25\%}", "25", 1, 1),
        ("", "42", 0, 0),
    ],
)  # fmt: skip
def test_the_answer_that_counts(solution, reference, flexible, strict):
    assert equals(solution, reference) == bool(flexible)
    assert equals(solution, reference, "strict") == bool(strict)
    example = Example("", "?", (reference,), 8)
    assert MathProblems("f", extract="strict").score(solution, example) == strict


def test_numbers_by_their_value():
    rng = random.Random(0)
    for _ in range(40):
        number, other = rng.sample(range(1000), 2)
        text = f"The values {other} and 7 lead to \\boxed{{{number:03d}}}."
        assert equals(text, str(number))
        assert not equals(text, str(other))
        assert equals(f"\\boxed{{\\frac{{{3 * number}}}{{3}}}}", str(number))


def boxed(text):
    """What is in the last closed box, by a reader that goes from each box on."""
    found = None
    for start in range(len(text)):
        for word in ("\\boxed{", "\\fbox{"):
            if text.startswith(word, start):
                open_braces, content = 1, ""
                for character in text[start + len(word) :]:
                    open_braces += {"{": 1, "}": -1}.get(character, 0)
                    if open_braces == 0:
                        found = content
                        break
                    content += character
    return None if found is None else found.strip()


def test_boxes_of_random_texts():
    rng = random.Random(1)
    pieces = ["\\boxed{", "\\fbox{", "{", "}", "}", "x", " ", "boxed", "\\frac", "3"]
    cases = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(3000)]
    assert sum(boxed(case) is not None for case in cases) > 500
    for case in cases:
        assert last_box(case) == boxed(case), case
    assert last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"


def test_away_from_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(equals(r"\boxed{0.50}", r"\frac12")))
    thread.start()
    thread.join()
    assert found == [True]


def test_answers_that_take_too_long(monkeypatch):
    """They are wrong, and the next ones are compared all the same."""
    monkeypatch.setattr(math_answers, "SECONDS", 1)
    assert not equals("\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", "1")
    assert not equals("\\boxed{" * 50_000, "1")
    monkeypatch.undo()
    assert equals(r"\boxed{(1)}", "1")
    assert not equals(r"\boxed{__import__('sys').exit()}", "1")


@pytest.mark.parametrize("listed", [False, True])
def test_problems_of_a_file(talker, tmp_path, listed):
    file = tmp_path / "problems.json"
    file.write_text(json.dumps(PROBLEMS) if listed else "\n".join(map(json.dumps, PROBLEMS)))
    task = MathProblems(str(file))
    task.check()
    examples = task.examples(Format(talker.tokenizer))
    assert [example.context for example in examples] == [row["problem"] for row in PROBLEMS]
    assert [dict(example.labels) for example in examples] == [
        {"level": row["level"], "subject": row["subject"]} for row in PROBLEMS
    ]
    assert all("\\boxed{}" in example.question and example.max_new_tokens == 2048 for example in examples)
    assert [task.score(f"\\boxed{{{row['answer']}}}", e) for row, e in zip(PROBLEMS, examples, strict=True)] == [1, 1]
    assert len(MathProblems(str(file), samples=1, max_new_tokens=16).examples(Format(talker.tokenizer))) == 1


@pytest.mark.parametrize("row", [{"problem": "?", "answer": 33}, {"question": "?", "answer": "033", "id": 1}])
def test_aime(talker, tmp_path, row):
    file = tmp_path / "aime.jsonl"
    file.write_text(json.dumps(row))
    task = MathProblems(str(file), "aime")
    (example,) = task.examples(Format(talker.tokenizer))
    assert (task.name, example.max_new_tokens) == ("aime", 8192)
    assert task.score("It is 33.", example) == task.score(r"\boxed{033}", example) == 1
    assert task.score(r"33, or \boxed{34}", example) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"problem": "?"}', "line 1: answer: field required"),
        ('{"answer": "1"}', "line 1: problem: field required"),
        ('[{"problem": "?", "answer": null}]', "problems.jsonl, row 1: answer.str: input should be a valid string"),
        ("[", "problems.jsonl: not JSON"),
        ("[]", "no rows"),
        ('{"problem": "?", "answer": "1000"}', "answer '1000'; AIME's are whole numbers from 0 to 999"),
        ('{"problem": "?", "answer": "x"}', "whole numbers from 0 to 999"),
    ],
)
def test_what_are_no_problems(tmp_path, content, says):
    file = tmp_path / "problems.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        MathProblems(str(file), "aime").check()


def test_settings_are_checked():
    for settings in ({"benchmark": "gsm8k"}, {"extract": "loose"}, {"samples": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            MathProblems("f", **settings)


def test_gsm8k_to_reason_about(talker, tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "so #### 1,200"}))
    task = GSM8K(str(file), None, shots=0, max_new_tokens=512)
    task.check()
    (example,) = task.examples(Format(talker.tokenizer))
    assert (task.name, example.context, example.max_new_tokens, example.stop) == ("gsm8k-0", "1 + 1?", 512, ())
    assert example.chat
    assert GSM8K(str(file), None, shots=0).new_tokens == 1024
    assert task.score(r"1, 2, so \boxed{\$1,200} of 7", example) == 1
    assert task.score(r"1200, or \boxed{7}", example) == 0
    assert task.score(r"\boxed{1{,}200}", example) == task.score(r"\boxed{1,\!200\text{ m}}", example) == 1
    assert task.score(r"<think>\boxed{7}</think> They are 1200.", example) == 1
    assert task.score(r"\boxed{\frac{2400}{2}}", example) == task.score(r"\boxed{1.2 \cdot 10^3}", example) == 1
    assert task.score(r"\boxed{1200 + 1}", example) == 0
    with pytest.raises(ValueError, match="no examples_file"):
        GSM8K(str(file), None, shots=1)
