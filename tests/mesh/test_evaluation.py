"""Evaluation over a mesh: the scores and bytes of one device, in files that one device goes on with, and processes of which the first writes."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoints import HF_CONFIG, write_hf

import kvjax
from kvjax.evals import Example, evaluate
from kvjax.evals.compare import compare
from kvjax.evals.fidelity import sweep
from kvjax.evals.following import following
from kvjax.evals.measure import prepare
from kvjax.evals.perplexity import streaming, windowed
from kvjax.evals.report import read_rows
from kvjax.evals.tasks import Inputs
from kvjax.models.sharding import get_shard, place_all

from . import processes

TIMES = "prefill_seconds", "decode_seconds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama of 4 query heads on 2 KV heads that reads bytes, and its text."""
    path = tmp_path_factory.mktemp("model")
    write_hf(path / "small", HF_CONFIG | {"max_position_embeddings": 1024}, tokenizer=True)
    letters = np.random.default_rng(6).choice(list("abcdefgh "), (40, 26))
    (path / "text.txt").write_text(" ".join(f"A{''.join(sentence)}." for sentence in letters))
    return path


@pytest.fixture(scope="module")
def params(folder):
    return kvjax.load(folder / "small", progress=False)


@dataclasses.dataclass(frozen=True)
class Letters:
    """Five questions of contexts of several lengths, and two of one context; what is right is what the answer begins with."""

    name: str = "letters"

    def examples(self, form):
        text = "a bird in the hand is worth two in the bush. "
        alone = [Example(text[: 12 + 7 * i], "what", ("x", "y"), 6, chat=False) for i in range(5)]
        return [*alone, *(Example(text, ask, ("z",), 5, chat=False, session=0) for ask in ("who?", "why?"))]

    def score(self, answer, example):
        return len(answer) / 100


def untimed(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@pytest.mark.parametrize(
    ("policy", "mesh"),
    [("snapkv:16,window=4", "data=2,model=2"), ("adakv:16,window=4", "data=3,model=2"), ("full", "data=2,sequence=2")],
)
def test_answers_scores_and_bytes(policy, mesh, params):
    expected = evaluate(params, Letters(), policy)
    found = evaluate(params, Letters(), policy, mesh=mesh)
    assert untimed(found.rows) == untimed(expected.rows)
    assert found.header["mesh"].startswith(mesh[:6])
    assert "mesh" not in expected.header


def test_the_question_is_known_and_a_run_goes_on_elsewhere(params, tmp_path):
    """A file that a mesh began is gone on with by one device, and the other way round."""
    task = dataclasses.replace(Letters(), name="alone")
    object.__setattr__(task, "examples", lambda form: Letters().examples(form)[:5])
    how = {"policy": "snapkv:16,window=4", "query_aware": True, "prefill_block": 16}
    expected = evaluate(params, task, **how)
    for first, then in (("data=2,model=2", None), (None, "data=2,model=2")):
        file = tmp_path / f"{first}.jsonl"
        assert untimed(evaluate(params, task, **how, out=file, mesh=first).rows) == untimed(expected.rows)
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
        assert untimed(evaluate(params, task, **how, out=file, mesh=then).rows) == untimed(expected.rows)


def test_texts(params, folder):
    text, mesh = params.tokenizer.encode((folder / "text.txt").read_text())[:80], "data=2,model=2"
    pairs = [(text[:30], text[30:40]), (text[10:20], text[20:25]), (text[5:45], text[45:50])]
    policy = kvjax.get_policy("h2o:16")
    for score in (
        lambda **over: windowed(params, text, 20, **over).logprobs,
        lambda **over: windowed(params, text, 24, stride=7, **over).logprobs,
        lambda **over: streaming(params, text, "tova:16", **over).logprobs,
        lambda **over: [each.logprob for each in following(params, policy, pairs, **over)],
    ):
        np.testing.assert_allclose(score(mesh=mesh), score(), atol=2e-5)
    policy = kvjax.get_policy("tova:16")
    many = streaming(params, text, policy, mesh=mesh)
    assert many.cache_bytes == policy.nbytes(params.config, 1, 0, len(text), params.dtype)


def test_fidelity(params, folder):
    text = params.tokenizer.encode((folder / "text.txt").read_text())[:72]
    policies = [kvjax.get_policy("adakv:24,window=4"), kvjax.get_policy("quest:24,page=4")]
    alone = sweep(params, text, 60, policies)
    for mesh in ("data=2,model=4", "model=2,sequence=2"):
        for one, many in zip(alone, sweep(params, text, 60, policies, mesh=mesh), strict=True):
            for field in dataclasses.fields(one):
                np.testing.assert_allclose(getattr(many, field.name), getattr(one, field.name), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* of the full cache's bytes")
def test_measures_and_tables(params, folder, tmp_path):
    """Of a model that lies on a mesh, without saying so again."""
    many = place_all(get_shard("data=2,model=2", params.config), params)
    inputs = Inputs(lengths=(64,), text=folder / "text.txt", queries=8)
    for name, given in (
        ("perplexity", inputs),
        ("fidelity", inputs),
        ("perplexity", dataclasses.replace(inputs, window=20)),
    ):
        policy = kvjax.get_policy("full" if given.window else "snapkv:24,window=4")
        one, other = (dataclasses.asdict(prepare(each, name, given).run(policy)) for each in (params, many))
        for outcome in (one, other):
            del outcome["details"], outcome["tokens_per_second"]
        assert other == one | {"value": pytest.approx(one["value"], abs=1e-4)}
    policies, targets = [kvjax.get_policy("snapkv:window=4")], [0.5]
    cells = [
        compare(each, policies, targets, ["perplexity"], inputs, tmp_path / str(i))
        for i, each in enumerate((params, many))
    ]
    rows = [[cell.row() | {"perplexity": 0, "tokens_per_second": 0} for cell in each] for each in cells]
    assert rows[0] == rows[1]
    assert json.loads((tmp_path / "1" / "table.json").read_bytes())["header"]["mesh"] == "data=2,model=2,sequence=1"


def test_the_first_of_two_processes_prints_and_writes(folder, params, tmp_path, monkeypatch):
    """A reading that one device began goes on in both, though the second has no file of it; nor has it the result, which is there the second time."""
    monkeypatch.setattr("time.monotonic", iter(range(0, 10**6, 100)).__next__)
    given = Inputs(lengths=(600,), text=folder / "text.txt")
    policy, out = kvjax.get_policy("streaming_llm:32"), tmp_path / "perplexity.jsonl"
    expected = prepare(params, "perplexity", given).run(policy)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(params, "perplexity", given).run(policy, out, interrupt)
    monkeypatch.undo()
    assert out.with_suffix(".state.npz").exists()
    asked = ["eval", "perplexity", "--model", str(folder / "small"), "--json", "--policy", "streaming_llm:32"]
    asked += ["--length", "600", "--text", str(given.text), "--mesh", "data=2,model=2"]
    for _ in range(2):
        first, second = processes.kvjax(asked, out, tmp_path / "other.jsonl")
        assert json.loads(first)["value"] == pytest.approx(expected.value, abs=1e-4)
        assert second == ""
        assert [path.name for path in tmp_path.iterdir()] == [out.name]
    (found,) = read_rows(out)
    assert (found["cache_bytes"], found["count"]) == (expected.cache_bytes, expected.count)
    assert found["tokens_per_second"] is None  # of a run that went on


@pytest.mark.mesh_long
@pytest.mark.filterwarnings("ignore:.* of the full cache's bytes")
def test_two_processes_compare(folder, params, tmp_path):
    """Answers, those to many questions of one context, and what reads without a cache, in a table of which the first writes all files."""
    turns = [{"input": "What is ab?", "answer": "12"}, {"input": "And cd?", "answer": ["345"]}]
    (folder / "contexts.jsonl").write_text(json.dumps({"context": "ab is 12, cd is 345, " * 5, "multi_turns": turns}))
    text, data, tasks = folder / "text.txt", folder / "contexts.jsonl", ["needle-number", "multi-query", "fidelity"]
    asked = ["compare", "--model", str(folder / "small"), "--json", "--policies", "snapkv", "--budgets", "0.5"]
    asked += ["--tasks", ",".join(tasks), "--text", str(text), "--data", str(data), "--length", "260"]
    asked += ["--max-new-tokens", "6", "--mesh", "data=2,model=2"]
    first, second = processes.kvjax(asked, tmp_path / "table", tmp_path / "other")
    inputs = Inputs(lengths=(260,), text=text, data=data, max_new_tokens=6)
    expected = compare(params, [kvjax.get_policy("snapkv")], [0.5], tasks, inputs, tmp_path / "one")
    for row, cell in zip(json.loads(first), expected, strict=True):
        value = {cell.outcome.metric: pytest.approx(cell.outcome.value, abs=1e-4), "tokens_per_second": None}
        assert row | {"tokens_per_second": None} == cell.row() | value
    assert second == ""
    assert {path.name for path in tmp_path.iterdir()} == {"table", "one"}
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("table", "one")]
    assert files[0] == files[1]
    for name in ("needle-number-full.jsonl", "multi-query-snapkv-0.5.jsonl"):
        one, two = (untimed(read_rows(tmp_path / folder / name)) for folder in ("one", "table"))
        assert one == two


def test_the_harness(params):
    """Continuations through a compressed cache, and answers, of requests that devices do not divide."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from kvjax.evals.lm_harness import register

    text = list(range(3, 60))
    pairs = [(("", ""), text[: 20 + i], text[30:34]) for i in range(3)]
    options = {"max_gen_toks": 5, "until": []}
    asked = [Instance("generate_until", {}, (each, options), i) for i, each in enumerate(("abc", "a letter", "z"))]
    one, many = (register()(params, "tova:16", max_length=64, mesh=mesh) for mesh in (None, "data=2,model=2"))
    scores = [[score for score, _ in model._loglikelihood_tokens(pairs)] for model in (one, many)]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
    assert many.generate_until(asked) == one.generate_until(asked)


def test_a_file_of_another_run_ends_both(folder, tmp_path):
    """The second process, which does not see the file, says what the first found."""
    (tmp_path / "out.jsonl").write_text("{}\n")
    asked = ["eval", "perplexity", "--model", str(folder / "small"), "--text", str(folder / "text.txt")]
    asked += ["--length", "64", "--mesh", "data=2,model=2"]
    for error in processes.kvjax(asked, tmp_path / "out.jsonl", tmp_path / "other.jsonl", failing=True):
        assert "out.jsonl is there, but is not a result file" in error
