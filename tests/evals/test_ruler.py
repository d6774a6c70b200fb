"""RULER's examples are solved from their prompts alone, by plain reading; its scores, by hand."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvjax.evals import Format, ruler
from kvjax.evals.ruler import scoring
from kvjax.evals.ruler.counting import zeta

pytest.importorskip("wonderwords", reason="RULER's vocabulary is in the `eval` extra")

TEXT = (Path(__file__).parents[2] / "docs" / "loomings.txt").read_text()
NIAH = [name for name in ruler.TASKS if name.startswith("niah")]
LENGTHS = {"cwe": (2200, 9000), "fwe": (1500, 3000), "vt": (2500, 5000)}


@pytest.fixture(scope="module")
def form(talker):
    return Format(talker.tokenizer)


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    path = tmp_path_factory.mktemp("qa") / "squad.json"
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {a}.{p} says that the colour of thing {a}.{p} is c{a}{p}.",
                    "qas": [
                        {"question": f"Colour of {a}.{p}?", "answers": [{"text": f"c{a}{p}"}], "is_impossible": p == 3}
                    ],
                }
                for p in range(4)
            ]
        }
        for a in range(20)
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return str(path)


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    path = tmp_path_factory.mktemp("qa") / "hotpot.json"
    entries = [
        {
            "question": f"Who wrote {i}?",
            "answer": f"writer {i}",
            "context": [[f"Title {i}.{j}", [f"Line {j}.", " More."]] for j in range(2)],
        }
        for i in range(30)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def solve_niah(prompt, question):
    """All values of the keys that the question names."""
    needles = re.findall(r"One of the special magic \w+ for (.+?) is: (\S+)\.", prompt)
    keys = re.split(r", and |, ", re.search(r" for (.+) mentioned", question)[1])
    return Counter(value for key, value in needles if key in keys)


def solve_vt(prompt, question):
    prompt = prompt[prompt.rindex("Memorize and track") :]
    value = re.search(r"the value (\d+)", question)[1]
    holds, found = {}, []
    for to, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt):
        holds[to] = holds.get(of, of)
        found += [to] if holds[to] == value else []
    return Counter(found)


def solve_cwe(prompt, question):
    prompt = prompt[prompt.rindex("Below is a numbered list") :].split("\n")[1]
    return Counter(
        dict.fromkeys((word for word, _ in Counter(re.findall(r"\d+\. (.+?)(?= \d+\.|$)", prompt)).most_common(10)), 1)
    )


def solve_fwe(prompt, question):
    words = prompt.split("coded words. ")[1].split()
    return Counter(dict.fromkeys((word for word, _ in Counter(words).most_common(4)[1:]), 1))


SOLVERS = {"vt": solve_vt, "cwe": solve_cwe, "fwe": solve_fwe} | dict.fromkeys(NIAH, solve_niah)


@pytest.mark.parametrize("name", SOLVERS)
def test_prompts_hold_their_answers_and_no_others(form, name):
    for length in LENGTHS.get(name, (1500, 4000)):
        for seed in (0, 1):
            task = ruler.ruler(name, length, samples=5, seed=seed, text=TEXT)
            examples = task.examples(form)
            assert len({example.context for example in examples}) == len(examples) == 5
            for example in examples:
                assert SOLVERS[name](example.context, example.question) == Counter(example.answers)
                assert 0.7 * length < form.count(example) <= length
                assert task.score("They are " + ", ".join(example.answers).upper(), example) == 1
                assert task.score("I do not know", example) == 0
                assert example.labels == {"length": length}
            assert examples == task.examples(form)


@pytest.mark.parametrize(
    ("name", "counts"), [("niah_multikey_1", (4, 1)), ("niah_multivalue", (4, 4)), ("niah_multiquery", (4, 4))]
)
def test_how_many_needles_are_hidden_and_asked_for(form, name, counts):
    (example,) = ruler.ruler(name, 2000, samples=1, text=TEXT).examples(form)
    assert (example.context.count("One of the special magic"), len(example.answers)) == counts


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_noise_and_needles_follow_the_needle(form, name, monkeypatch):
    """RULER puts the needle before one of the lines, so the last line is never the needle's."""
    monkeypatch.setattr("kvjax.evals.ruler.niah.largest", lambda build, *options, **limits: build(3))
    found = Counter()
    for example in ruler.ruler(name, 1000, samples=100).examples(form):
        lines = example.context.rstrip().split("\n")
        (at,) = (i for i, line in enumerate(lines) if example.answers[0] in line)
        found[len(lines) - at] += 1
    assert sorted(found) == [2, 3, 4]
    assert min(found.values()) > 15


def test_hay_of_needles_fills_the_length(form):
    (example,) = ruler.ruler("niah_multikey_3", 4000, samples=1).examples(form)
    assert example.context.count("One of the special magic uuids for") > 20
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", example.answers[0])


def test_questions_of_files(form, squad, hotpot):
    for name, file, gold in (("qa_1", squad, 1), ("qa_2", hotpot, 2)):
        task = ruler.ruler(name, 1000, samples=20, file=file)
        for i, example in enumerate(task.examples(form)):
            assert form.count(example) <= 1000
            documents = re.findall(r"Document \d+:\n(.*)", example.context)
            assert len(documents) == len(set(documents)) > gold
            assert task.score(f" it is {example.answers[0].upper()}.\x00", example) == 1
            if name == "qa_1":
                article, paragraph = divmod(i, 3)
                assert any(f"is c{article}{paragraph}." in document for document in documents)
                assert sum(f"Paragraph {article}." in document for document in documents) == 4
    with pytest.raises(ValueError, match="makes qa_1, not qa_2"):
        ruler.ruler("qa_2", 1000, samples=1, file=squad)
    with pytest.raises(ValueError, match="has 60 questions"):
        ruler.ruler("qa_1", 1000, samples=61, file=squad).examples(form)


def test_every_word_before_any_comes_more_often(form, monkeypatch):
    monkeypatch.setattr("kvjax.evals.ruler.counting.all_words", lambda: tuple(f"w{i}" for i in range(40)))
    (example,) = ruler.ruler("cwe", 6000, samples=1).examples(form)
    listed = example.context[example.context.rindex("Below is") :].split("\n")[1]
    counts = Counter(re.findall(r"\. (w\d+)", listed))
    often, seldom = set(counts.values()) - {min(counts.values())}, min(counts.values())
    assert len(counts) == 40
    assert often == {10 * seldom}
    assert seldom % 3 == 0


def test_scores():
    assert scoring.match_all(" Alpha\nand BETA ", ["alpha", "beta", "gamma", "delta"]) == 0.5
    assert scoring.match_part("Alpha", ["gamma", "ALPHA"]) == 1
    assert scoring.match_part("Alpha", ["gamma"]) == 0
    assert scoring.cleaned("a\x07b\x00") == "a\nb"


def test_zeta():
    scipy = pytest.importorskip("scipy.special")
    for s in (1.2, 2.0, 3.5):
        assert zeta(s) == pytest.approx(float(scipy.zeta(s)), rel=1e-9)


def test_what_cannot_be_made(form):
    with pytest.raises(ValueError, match="hides its needles in a text"):
        ruler.ruler("niah_single_2", 1000, samples=1)
    with pytest.raises(ValueError, match="unknown RULER task"):
        ruler.ruler("niah", 1000, samples=1)
    with pytest.raises(ValueError, match="cannot hold the shortest example"):
        ruler.ruler("vt", 500, samples=1).examples(form)
    for samples, length in ((0, 512), (1, 0)):
        for name in ("vt", "fwe", "niah_single_1"):
            with pytest.raises(ValueError, match=f"length={length}, samples={samples}; give 1 or more"):
                ruler.ruler(name, length, samples)
    with pytest.raises(ValueError, match="need a file of questions"):
        ruler.ruler("qa_1", 1000, samples=1)
