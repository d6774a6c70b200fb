"""LongBench's scores against plain definitions and its published dependencies, on its samples and on random texts."""

import dataclasses
import difflib
import json
import random
import string
import warnings
from collections import Counter

import pytest
from checkpoints import default_model

from kvjax.config import Yarn
from kvjax.evals import Example, Format, LongBench, measure
from kvjax.evals.longbench import metrics, tasks
from kvjax.evals.tasks import Inputs, make_task

rouge = pytest.importorskip("rouge", reason="LongBench's metrics are in the `eval` extra")
jieba = pytest.importorskip("jieba", reason="LongBench's metrics are in the `eval` extra")

WORDS = ["the", "A", "river", "runs", "by", "stone", "Stone.", "bridge,", "an", "old", "mill", "10", "wheel!"]
HAN = "全国美国文学研究会第十八届年会在厦门大学举办，与会代表讨论了小说。"


def longest_common(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def plain_f1(answer, reference):
    common = sum(min(answer.count(word), reference.count(word)) for word in set(answer))
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def plain_words(text):
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def longbench_rows(shared, name):
    return [json.loads(line) for line in (shared / "data/tasks/longbench" / f"{name}.jsonl").read_text().splitlines()]


def variants(text, rng):
    """The text itself, and as a model may have it: a part, words left out, words out of order."""
    words = list(text) if " " not in text else text.split()
    joint = "" if " " not in text else " "
    start = rng.randrange(max(1, len(words) // 2))
    yield from (text, joint.join(words[start : start + 60]), joint.join(w for w in words if rng.random() < 0.6))
    yield joint.join(rng.sample(words, min(len(words), 40)))


def test_english_f1_on_random_texts():
    rng = random.Random(0)
    for _ in range(300):
        answer, reference = (" ".join(rng.choices(WORDS, k=rng.randrange(0, 12))) for _ in range(2))
        expected = plain_f1(plain_words(answer), plain_words(reference))
        assert metrics.f1(answer, reference) == pytest.approx(expected, abs=1e-9)


def test_rouge_of_one_sentence_is_its_definition():
    """Of sentences without a repeated word, where the package's counting of words once makes no difference."""
    rng = random.Random(1)
    for _ in range(200):
        a, b = (rng.sample(string.ascii_lowercase, rng.randrange(1, 12)) for _ in range(2))
        expected = 2 * longest_common(a, b) / (len(a) + len(b))
        assert metrics.rouge_l(" ".join(a), " ".join(b)) == pytest.approx(expected, abs=1e-7)
    assert metrics.rouge_l("", "something") == metrics.rouge_l("...", "something") == 0


def test_summaries_of_the_samples(shared):
    """Whole texts, against the package that LongBench's scorer calls."""
    rng, scorer = random.Random(2), rouge.Rouge()
    for row in longbench_rows(shared, "multi_news"):
        for answer in variants(row["answers"][0], rng):
            expected = scorer.get_scores([answer], row["answers"], avg=True)["rouge-l"]["f"]
            assert metrics.rouge_l(answer, row["answers"][0]) == pytest.approx(expected, abs=1e-9)


def test_chinese_f1_of_the_samples(shared):
    rng, marks = random.Random(3), set(string.punctuation + "！？。，、；：“”‘’（）《》…—")

    def words(text):
        bare = ("".join(c for c in word.lower() if c not in marks and not c.isspace()) for word in jieba.lcut(text))
        return [word for word in bare if word]

    for row in longbench_rows(shared, "multifieldqa_zh"):
        (reference,) = row["answers"]
        for answer in variants(reference + HAN, rng):
            assert metrics.f1_zh(answer, reference) == pytest.approx(
                plain_f1(words(answer), words(reference)), abs=1e-9
            )


def test_chinese_rouge():
    """Cut into words first: without spaces a text would be one word."""
    expected = (
        2
        * longest_common(*map(jieba.lcut, ("厦门大学举办年会", "厦门大学讨论小说")))
        / sum(len(jieba.lcut(text)) for text in ("厦门大学举办年会", "厦门大学讨论小说"))
    )
    assert 0 < expected < 1
    assert metrics.rouge_l_zh("厦门大学举办年会", "厦门大学讨论小说") == pytest.approx(expected, abs=1e-7)


def test_edit_similarity_is_fuzzywuzzys():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that python-Levenshtein would be faster
        fuzz = pytest.importorskip("fuzzywuzzy.fuzz")
    assert fuzz.SequenceMatcher is difflib.SequenceMatcher, "python-Levenshtein is installed, which gives other values"
    rng = random.Random(4)
    for _ in range(200):
        a, b = ("".join(rng.choices("return self.x()[0] = yz", k=rng.randrange(0, 40))) for _ in range(2))
        assert metrics.edit_similarity(a, b) == pytest.approx(fuzz.ratio(a, b) / 100, abs=1e-9)
    assert metrics.edit_similarity("\n\n```python\n# first\nx = 1\ny = 2", "x = 1") == 1


def test_classification_retrieval_and_count():
    classes = ("sport", "world sport", "law", "tax law")
    assert metrics.classification("It is law.", "law", classes) == 1
    assert metrics.classification("tax law", "tax law", classes) == 1  # "law" is part of it, and does not count
    assert metrics.classification("law, sport", "law", classes) == 1 / 2
    assert metrics.classification("tax law", "law", classes) == 1 / 2
    assert metrics.classification("none", "law", classes) == 0
    assert metrics.retrieval("Paragraph 7 or 17 or 7", "Paragraph 7") == 2 / 3
    assert metrics.retrieval_zh("段落27", "段落27") == 1
    assert metrics.count("12 of 30", "30") == 1 / 2
    assert metrics.count("none", "30") == 0
    with pytest.raises(ValueError, match="names no paragraph"):
        metrics.retrieval("1", "Section 1")


def test_all_tasks_of_the_samples(shared):
    """Prompts and lengths are LongBench's."""
    folder = shared / "data/tasks/longbench"
    prompts, lengths = (json.loads((folder / f"dataset2{what}.json").read_text()) for what in ("prompt", "maxlen"))
    assert {name: task["prompt"] for name, task in tasks().items()} == prompts
    assert {name: task["max_new_tokens"] for name, task in tasks().items()} == lengths
    assert Counter(task["metric"] for task in tasks().values()) == {
        "f1": 7, "rouge_l": 4, "edit_similarity": 2, "rouge_l_zh": 2, "classification": 2,
        "f1_zh": 1, "count": 1, "retrieval": 1, "retrieval_zh": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_prompts_are_cut_in_the_middle(talker, shared, name):
    form, file = Format(talker.tokenizer), str(shared / "data/tasks/longbench" / f"{name}.jsonl")
    prompt = tasks()[name]["prompt"]
    for limit in (2000, 100_000):
        task = LongBench(name, file, max_length=limit, samples=8)
        for row, example in zip(longbench_rows(shared, name), task.examples(form), strict=False):
            text = prompt.replace("{context}", row["context"]).replace("{input}", row["input"])
            tokens = talker.tokenizer.encode(text)
            if len(tokens) > limit:
                ends = tokens[: limit // 2], tokens[-(limit // 2) :]
                text = "".join(map(talker.tokenizer.decode, ends))
            assert example.context + example.question == text
            assert example.question == prompt.split("{context}")[1].replace("{input}", row["input"])
            assert task.score(row["answers"][0], example) == pytest.approx(1, abs=1e-6)
            assert task.score("", example) == 0


def test_of_few_shot_answers_the_first_line_counts(tmp_path, talker):
    row = {"context": "c", "input": "i", "answers": ["law"], "length": 1, "all_classes": ["law", "sport"]}
    file = tmp_path / "trec.jsonl"
    file.write_text(json.dumps(row))
    task = LongBench("trec", str(file))
    (example,) = task.examples(Format(talker.tokenizer))
    assert task.score("\nlaw\nQuestion: sport", example) == 1
    assert example.choices == ("law", "sport")


def test_a_question_too_long_is_cut_itself(talker):
    from kvjax.evals.longbench import truncated

    assert truncated(Format(talker.tokenizer), "abcdef", "0123456789", 8) == ("abcd", "6789")


def test_what_is_no_longbench(tmp_path, talker):
    with pytest.raises(ValueError, match="there are narrativeqa"):
        LongBench("nope", "file")
    for content, says in (
        ("nothing", "line 1: not JSON"),
        ("", "no rows"),
        ('{"context": ""}', "input: field required"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ValueError, match=says):
            LongBench("trec", str(tmp_path / "bad.jsonl")).examples(Format(talker.tokenizer))
    assert LongBench("trec", "f").score("a", Example("", "", ("b",), 1, choices=("a", "b"))) == 0


@pytest.mark.parametrize(
    ("name", "classes"), [("2wikimqa", ["red", "blue"]), ("2wikimqa", None), ("trec", ["red", "blue"])]
)
def test_classes_belong_to_tasks_that_classify(tmp_path, talker, name, classes):
    row = {"context": "c", "input": "i", "answers": ["red"], "all_classes": classes, "length": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task = LongBench(name, str(tmp_path / "rows.jsonl"))
    (example,) = task.examples(Format(talker.tokenizer))
    assert task.score("red", example) == 1
    for other in (None, []):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"all_classes": other}))
        with pytest.raises(ValueError, match="line 1: all_classes: "):
            LongBench("lsht", str(tmp_path / "rows.jsonl")).check()


@pytest.mark.parametrize("name", ["passage_retrieval_zh", "multifieldqa_zh"])
def test_default_prompts_leave_room_for_the_chat_template(shared, name):
    tokenizer = default_model().tokenizer()
    task = make_task(f"longbench-{name}", Inputs(data=shared / "data/tasks/longbench", samples=2), window=2048)
    form = Format(tokenizer, chat=True)
    assert all(2048 - 128 < form.count(example) <= 2048 for example in task.examples(form))


def test_texts_are_cut_to_the_scaled_window(talker, monkeypatch):
    """YaRN by 4 leaves four times as much of a text."""
    windows = []

    def make_task(name, inputs, window):
        windows.append(window)
        raise LookupError

    monkeypatch.setattr("kvjax.evals.measure.make_task", make_task)
    rope = dataclasses.replace(talker.config.rope, scaling=Yarn(4.0, 8192))
    params = talker.replace(config=talker.config.with_attention(rope=rope))
    with pytest.raises(LookupError):
        measure.prepare(params, "longbench-2wikimqa", Inputs())
    assert windows == [32768]
