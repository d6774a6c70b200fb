"""Result files that a run goes on with: every answer is read back as it was, and what is damaged costs no other row."""

import contextlib
import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import TEMPLATE

from kvjax.bench.case import Case
from kvjax.bench.results import Results
from kvjax.cache import layer_specs
from kvjax.conversion import Tokenizer
from kvjax.evals import GSM8K, LongBench, NeedleInAHaystack, evaluate, gsm8k, rescore, runner
from kvjax.evals.checkpoint import Checkpoint
from kvjax.evals.measure import prepare
from kvjax.evals.report import read_rows
from kvjax.evals.tasks import Inputs
from kvjax.policies import CateKV, Critical, StreamingLLM

TASK = NeedleInAHaystack(lengths=(300,), depths=(0.0, 0.5, 1.0), kind="passkey")
ODD = "12345 a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\nh ü 語"
"""Everything at which `str.splitlines` cuts."""


class Run:
    """`evaluate` into a file, of a model that answers at once.

    Attributes:
        out: the file.
        asked: examples that the model was asked in the latest run.
    """

    def __init__(self, params, out):
        self._params, self.out, self.asked = params, out, 0

    def __call__(self):
        self.asked = 0
        return evaluate(self._params, TASK, batch=1, out=self.out).rows

    def answer(self, params, prompts, **options):
        self.asked += len(prompts)
        shares = ("cache_bytes", "host_cache_bytes", "full_cache_bytes", "prefill_seconds", "decode_seconds")
        for i in range(len(prompts)):
            stats = SimpleNamespace(rows=len(prompts), **dict.fromkeys(shares, 2.0 * (i + 1)))  # of the call so far
            yield i, SimpleNamespace(text=ODD, tokens=[1, 2], stats=stats)


@pytest.fixture
def run(talker, tmp_path, monkeypatch):
    run = Run(talker, tmp_path / "needle.jsonl")
    monkeypatch.setattr(runner, "iterate", run.answer)
    return run


def test_answers_may_have_any_character(run):
    rows = run()
    assert [row["answer"] for row in rows] == [ODD] * 3
    assert (run(), run.asked) == (rows, 0)


@pytest.mark.parametrize("ending", [b"", b"\x00\x00\x00"], ids=["none", "zeros"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_last_line_that_was_cut_short_is_run_again(run, part, ending):
    rows = run()
    *lines, last = run.out.read_bytes().split(b"\n")[:-1]
    run.out.write_bytes(b"\n".join(lines) + b"\n" + last[: int(part * len(last))] + ending)
    with pytest.warns(UserWarning, match=r"needle.jsonl, line 4: cut short"):
        assert (run(), run.asked) == (rows, 1)
    assert run.out.read_bytes() == b"\n".join([*lines, last]) + b"\n"


def test_a_damaged_byte_of_the_last_line_is_not_a_cut(run):
    """Nor is one of its newline: rows are refused or read, and the file is as it was."""
    run()
    content = run.out.read_bytes()
    begin = content[:-1].rindex(b"\n") + 1
    for at in (*range(begin, len(content), 37), len(content) - 2, len(content) - 1):
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        run.out.write_bytes(damaged)
        with contextlib.suppress(ValueError):  # of a value that no row has
            run()
        assert (run.out.read_bytes(), run.asked) == (damaged, 0), at


def test_a_cut_within_a_character(run):
    rows = run()
    content = run.out.read_bytes()
    run.out.write_bytes(content[: content.rindex("語".encode()) + 1])
    with pytest.warns(UserWarning, match="cut short"):
        assert (run(), run.asked) == (rows, 1)


@pytest.mark.parametrize("changed", ["problems.jsonl", "solved.jsonl"])
def test_a_run_does_not_resume_after_a_file_of_its_task_has_changed(talker, tmp_path, run, changed):
    solved = [{"question": f"{i} + 1?", "answer": f"so #### {i + 1}"} for i in range(9)]
    for name in ("problems.jsonl", "solved.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, solved)))
    paths = [str(tmp_path / name) for name in ("problems.jsonl", "solved.jsonl")]
    found = evaluate(talker, GSM8K(*paths), out=run.out).rows
    assert len(found) == run.asked == 9
    gsm8k._read.cache_clear()
    assert evaluate(talker, GSM8K(*paths), out=run.out).rows == found
    solved[0]["question"] = "0 plus 1?"
    (tmp_path / changed).write_text("\n".join(map(json.dumps, solved)))
    gsm8k._read.cache_clear()
    with pytest.raises(ValueError, match=r"holds results of another run .*settings examples: '9, SHA-256"):
        evaluate(talker, GSM8K(*paths), out=run.out)


def test_a_policy_does_not_resume_after_its_profile_has_changed(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text("1")
    policy = Critical(CateKV(profile=str(profile)))
    before = runner.described_policy(policy)
    assert runner.described_policy(policy) == before
    profile.write_text("2")
    assert runner.described_policy(policy) != before
    assert "files" not in runner.described_policy(StreamingLLM())


def test_a_text_that_has_changed(talker, tmp_path):
    book, out = tmp_path / "book.txt", tmp_path / "fidelity.jsonl"
    inputs = Inputs(lengths=(64,), text=book)
    for text in ("One fish. Two fish. ", "Red fish. Blue fish. "):
        book.write_text(text * 10)
        ready = prepare(talker, "fidelity", inputs)
        if not out.exists():
            ready.run(runner.get_policy("full"), out)
    with pytest.raises(ValueError, match=r"holds results of another run .*settings tokens: '64, SHA-256"):
        ready.run(runner.get_policy("full"), out)


def test_answers_are_scored_again_without_the_model(run, tmp_path):
    rows = run()
    assert [row["score"] for row in rows] == [0, 0, 0]
    changed = [row | {"answer": f"It is {row['answers'][0]}." if row["example"] else ""} for row in rows]
    header = run.out.read_text(encoding="utf-8").split("\n")[0]
    text = "\n".join([header, *map(json.dumps, changed), ""])
    run.out.write_text(text, encoding="utf-8")
    found = rescore(run.out, TASK, tmp_path / "again.jsonl")
    assert [row["score"] for row in found.rows] == [0, 1, 1]
    assert found.score == pytest.approx(2 / 3)
    assert run.out.read_text(encoding="utf-8") == text
    assert [row["score"] for row in read_rows(tmp_path / "again.jsonl")] == [0, 1, 1]
    assert found.rows[0] == changed[0] | {"score": 0}
    rescore(run.out, TASK)
    assert [row["score"] for row in run()] == [0, 1, 1], "the file is still this run's"
    assert run.asked == 0
    with pytest.raises(ValueError, match="has answers to needle-passkey, not to gsm8k-0"):
        rescore(run.out, GSM8K("f", None, shots=0))
    run.out.write_text(header + '\n{"example": 0}\n')
    with pytest.raises(ValueError, match=r"needle.jsonl, line 2: score: field required"):
        rescore(run.out, TASK)


def test_classes_are_kept_to_score_again(talker, tmp_path, run):
    data = tmp_path / "trec.jsonl"
    row = {"context": "?", "input": "!", "answers": ["12345 a"], "all_classes": ["12345 a", "red"], "length": 1}
    data.write_text(json.dumps(row))
    task = LongBench("trec", str(data))
    (found,) = evaluate(talker, task, out=run.out).rows
    assert (found["choices"], found["score"]) == (["12345 a", "red"], 1)
    data.unlink()
    assert rescore(run.out, task).rows[0] == found


OPENS = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")


@pytest.mark.parametrize(
    ("thought", "score"), [("6*7. 6*7 is 42. Let me check 6*7 again: 42", 0), ("6*7 is 7.</think> It is 42.", 1)]
)
def test_a_thought_that_the_template_opens(talker, tmp_path, run, monkeypatch, thought, score):
    """Templates of DeepSeek-R1, QwQ and Qwen3-Thinking end the prompt in <think>, so answers have no such tag."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "6 * 7?", "answer": "#### 42"}))
    tokenizer = Tokenizer(talker.tokenizer.backend, eos=talker.tokenizer.eos, chat_template=OPENS)
    monkeypatch.setattr(f"{__name__}.ODD", thought)
    task = GSM8K(str(problems), None, shots=0)
    (row,) = evaluate(talker.replace(tokenizer=tokenizer), task, out=run.out).rows
    assert (row["answer"], row["score"]) == ("<think>\n" + thought, score)
    assert rescore(run.out, task).score == score
    (row,) = evaluate(talker, task).rows
    assert (row["answer"], row["score"]) == (thought, 1), "no thought was begun"


@pytest.mark.parametrize("ending", [b"\n", b"\n\n", b"\n \n"], ids=["newline", "blank", "spaces"])
@pytest.mark.parametrize("at", [0, 20, -1], ids=["first", "middle", "last"])
def test_a_damaged_byte_in_the_last_complete_line_is_told_and_left_alone(run, at, ending):
    run()
    *lines, last = run.out.read_bytes().split(b"\n")[:-1]
    damaged = bytearray(last)
    damaged[at] = 0xFF
    refused(run, b"\n".join([*lines, bytes(damaged)]) + ending, r"needle.jsonl, line 4: not UTF-8")
    refused(run, b"\n".join([*lines, last[: len(last) // 2]]) + ending, r"needle.jsonl, line 4: not JSON")


def test_a_last_line_that_lacks_but_its_newline_is_whole(run):
    rows = run()
    content = run.out.read_bytes()
    run.out.write_bytes(content.removesuffix(b"\n"))
    assert (run(), run.asked) == (rows, 0)
    assert run.out.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": "1"}, "score: input should be a valid number, not '1'"),
        ({"score": 1.5}, "score: input should be less than or equal to 1, not 1.5"),
        ({"score": None}, "score: input should be a valid number"),
        ({"score": float("nan")}, "score: "),
        ({"example": 3}, "example 3, but there are 3, counted from 0"),
        ({"example": -1}, "example: input should be greater than or equal to 0, not -1"),
        ({"example": True}, "example: input should be a valid integer"),
        ({"example": 0}, "example 0 is there twice"),
        ({"answer": 5}, "answer: input should be a valid string, not 5"),
        ({"labels": {}}, "labels of example 1 are {}, but should be {'length': 300, 'depth': 0.5, 'kind': 'passkey'}"),
        ({"labels": [1]}, "labels: input should be"),
        ({"answers": ["00000"]}, r"answers of example 1 are \['00000'\], but should be"),
        ({"new_tokens": -1}, "new_tokens: "),
        ({"decode_seconds": None}, "decode_seconds: "),
    ],
)
def test_rows_are_what_they_should_be(run, change, says):
    run()
    lines = run.out.read_text(encoding="utf-8").split("\n")
    lines[2] = json.dumps(json.loads(lines[2]) | change)
    refused(run, "\n".join(lines).encode(), rf"needle.jsonl, line 3: {says}")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"example": 1, "score"', r"line 3: not JSON \(Expecting ':' delimiter at column 23\)"),
        (b"[1]", "line 3: input should be"),
        (b"{}", "line 3: example: field required"),
        (b'"\xff"', r"line 3: not UTF-8 text \(invalid start byte at byte 1\)"),
        (b"[" * 100_000, "line 3: not JSON"),
    ],
)
def test_damage_in_the_middle_is_told_and_left_alone(run, line, says):
    run()
    lines = run.out.read_bytes().split(b"\n")
    refused(run, b"\n".join([*lines[:2], line, *lines[3:]]), says)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"header": {}}', b'{"header": {"settings": 1, "versions": 2}}', b"\xff"]
)
def test_what_is_no_result_file_is_left_alone(run, content):
    refused(run, content, "is there, but is not a result file of kvjax; give another path")


def test_a_pipe_or_an_enormous_file_is_no_result_file(run):
    os.mkfifo(run.out)
    with pytest.raises(OSError, match="a run cannot resume from a pipe; give a regular file"):
        run()
    run.out.unlink()
    with run.out.open("wb") as stream:
        stream.truncate(1 << 36)
    with pytest.raises(ValueError, match="68719476736 bytes; files of at most"):
        run()
    assert run.asked == 0


def refused(run, content, says):
    run.out.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        run()
    assert (run.asked, run.out.read_bytes()) == (0, content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": "low"}, "line 2: value: input should be a valid number"),
        ({"policy": "treekv"}, "line 2: policy 'treekv', not 'full'"),
        ({"task": "vt"}, "line 2: task 'vt', not 'fidelity'"),
        ({"count": None}, "line 2: count: "),
        (None, "line 3: the result is there twice"),
    ],
)
def test_a_measure_is_one_row(talker, tmp_path, change, says):
    book, out = tmp_path / "book.txt", tmp_path / "fidelity.jsonl"
    book.write_text("One fish. Two fish. " * 10)
    inputs = Inputs(lengths=(64,), text=book)
    found = prepare(talker, "fidelity", inputs).run(runner.get_policy("full"), out)
    assert prepare(talker, "fidelity", inputs).run(runner.get_policy("full"), out) == found
    header, row = out.read_text().split("\n")[:2]
    rows = [row, row] if change is None else [json.dumps(json.loads(row) | change)]
    out.write_text("\n".join([header, *rows, ""]))
    with pytest.raises(ValueError, match=says):
        prepare(talker, "fidelity", inputs).run(runner.get_policy("full"), out)


def test_what_is_not_finite_is_null_and_comes_back(talker, tmp_path):
    """JSON has no NaN: a strict parser must take the file, and the run that goes on with it too."""
    book, out = tmp_path / "book.txt", tmp_path / "fidelity.jsonl"
    book.write_text("One fish. Two fish. " * 10)
    broken = dataclasses.replace(talker, norm=talker.norm * float("nan"))
    found = prepare(broken, "perplexity", Inputs(lengths=(20,), text=book)).run(runner.get_policy("full"), out)
    assert found.value != found.value

    def strict(name):
        raise AssertionError(name)

    header, row, _ = out.read_text().split("\n")
    assert json.loads(row, parse_constant=strict)["value"] is None
    again = prepare(broken, "perplexity", Inputs(lengths=(20,), text=book)).run(runner.get_policy("full"), out)
    assert again.value != again.value
    assert again.count == found.count


@pytest.fixture(scope="module")
def state(tiny, tmp_path_factory):
    """A checkpoint of a reading, and how to load one for it."""
    policy, path = StreamingLLM(budget=8, sinks=2), tmp_path_factory.mktemp("state") / "state.npz"
    caches = tuple(policy.layer(spec).init() for spec in layer_specs(tiny.config, 1, 0, 20, tiny.dtype))
    Checkpoint(path, {"a": 1}).save(caches, 3, np.zeros((1, 3), np.float32))
    return path, lambda file: Checkpoint(file, {"a": 1}).load(caches)


def test_a_damaged_checkpoint_is_told(state, tmp_path):
    whole, load = state
    content, file = whole.read_bytes(), tmp_path / "state.npz"
    assert load(whole)[1] == 3
    damaged = [content[: int(part * len(content))] for part in (0, 0.1, 0.5, 0.9, 0.999)]
    damaged += [
        content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        for at in (0, *range(200, len(content) // 2, 997))
    ]
    for each in [*damaged, b"PK\x03\x04", b"\x93NUMPY"]:
        file.write_bytes(each)
        with pytest.raises(ValueError, match=r"state.npz is no checkpoint that can be read"):
            load(file)


def test_a_checkpoint_is_a_file_of_its_own_size(state, tmp_path):
    """A pipe would be waited for, and compressed arrays could be a thousand times as large as the file."""
    whole, load = state
    with np.load(whole) as found:
        np.savez_compressed(tmp_path / "packed.npz", **found)
    with pytest.raises(ValueError, match=r"no checkpoint that can be read \(it is compressed\)"):
        load(tmp_path / "packed.npz")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(OSError, match="a regular file was expected"):
        load(tmp_path / "pipe.npz")
    with (tmp_path / "sparse.npz").open("wb") as stream:
        stream.truncate(1 << 36)
    with pytest.raises(ValueError, match="68719476736 bytes"):
        load(tmp_path / "sparse.npz")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": 4}, "scores of shape"),
        ({"scores": np.zeros((1, 3))}, "scores of shape"),
        ({"scores": np.zeros(3, np.float32)}, "scores of shape"),
        ({"leaf0": np.zeros(5, np.uint8)}, "caches of other sizes"),
        ({"run": "{}"}, "of another run"),
    ],
)
def test_a_checkpoint_is_what_it_should_be(state, tmp_path, change, says):
    whole, load = state
    with np.load(whole) as found:
        arrays = dict(found) | change
    np.savez(tmp_path / "state.npz", **arrays)
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "state.npz")


CASE = dataclasses.asdict(Case("full", {}, 10, 1, "tiny"))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([CASE, CASE | {"tpot_ms": 3.0}], "row 2: the case of row 1 again"),
        ([CASE, CASE | {"context": "10"}], "row 2: context: input should be a valid integer, not '10'"),
        ([CASE | {"policy": None}], "row 1: policy: "),
        ([{"failed": "x"}], "row 1: policy: field required"),
        ([CASE | {"tpot_ms": "fast"}], "row 1: tpot_ms: input should be a valid number"),
        ([1], "is not a result file of kvjax"),
        ({"a": 1}, "is not a result file of kvjax"),
    ],
)
def test_rows_of_a_benchmark(tmp_path, rows, says):
    out = tmp_path / "bench.json"
    out.write_text(json.dumps({"header": {}, "rows": rows}))
    before = out.read_bytes()
    with pytest.raises(ValueError, match=says):
        Results(out, [], {}, said=lambda row: None)
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", [b"\xff", b"", b"[", b'{"header": {}, "rows": null}'])
def test_what_is_no_benchmark(tmp_path, content):
    out = tmp_path / "bench.json"
    out.write_bytes(content)
    with pytest.raises(ValueError, match=r"bench.json is there, but is not a result file of kvjax"):
        Results(out, [], {}, said=lambda row: None)


def test_a_benchmark_writes_strict_json(tmp_path):
    out, case = tmp_path / "bench.json", Case("full", {}, 10, 1, "tiny")
    Results(out, [case], {}, said=lambda row: None).add(case, {"tpot_ms": float("nan"), "failed": "a\ud800"})
    assert Results(out, [case], {}, said=lambda row: None).missing() == []
    assert (json.loads(out.read_text())["rows"][0]["tpot_ms"], "NaN" in out.read_text()) == (None, False)


def test_a_benchmark_of_before_weights_were_told_goes_on(tmp_path):
    out, case = tmp_path / "bench.json", Case("full", {}, 10, 1, "tiny")
    others = dataclasses.replace(case, weights="int8")
    row = {name: value for name, value in dataclasses.asdict(case).items() if name != "weights"}
    out.write_text(json.dumps({"header": {}, "rows": [row | {"tpot_ms": 1.0}]}))
    assert Results(out, [case, others], {}, said=lambda row: None).missing() == [others]
