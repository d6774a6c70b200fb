"""The papers' claims: the rule that judges them, the page made of them, and that each is about something that is measured."""

import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quick_programs

from benchmarks import report
from kvjax.config import PRESETS
from kvjax.evals import Perplexity
from kvjax.evals.intervals import mean_interval
from kvjax.policies import get_policy
from reproduction import papers
from reproduction.analyses.continuation import Continuation
from reproduction.claims import (
    bench,
    catekv_ratios,
    catekv_recall,
    catekv_retained,
    catekv_ruler,
    chunkkv_layers,
    clusterkv_lengths,
    clusterkv_recall,
    page,
    papers_tasks,
    times,
    treekv,
)
from reproduction.claims.claim import FULL, MEASURES, STREAMING, Claim, table

SECTIONS = page.sections()
RESULTS = sorted((Path(papers.__file__).parent / "results").glob("reproduction-*.json"))


def judged(
    ours: list[float], other: list[float], margin: float = 0.0, measure: str = "recall of important tokens", **more
) -> str:
    """The verdict on "a is better than b" for these samples, by a measure that needs no headroom."""
    rows = [{"measure": measure, "method": name, "at": "x", "samples": of} for name, of in (("a", ours), ("b", other))]
    rows += [
        {"measure": measure, "method": name, "at": "x", "samples": of} for name, of in more.items() if name != "own"
    ]
    own = more.get("own", MEASURES[measure].kind)
    (pair,) = Claim("says", "where", "paper", own, measure, "a", ("b",), "x", margin).pairs
    return pair.verdict(table(rows))


def test_verdicts_by_hand():
    """Of the differences 2, 3, 4 the mean is 3 and its standard error 1 / √3, 4.30 times which is 2.48; of 1, 2, 3 the mean is 2."""
    assert judged([2, 3, 4], [0, 0, 0]) == "holds"
    assert judged([0, 0, 0], [2, 3, 4]) == "fails"
    assert judged([1, 2, 3], [0, 0, 0]) == "undecided"
    assert judged([1, 2, 3], [1, 2, 3]) == "undecided"
    assert judged([2.0], [1.0]) == "undecided"


def test_a_margin_moves_the_line():
    """One worse by 0.023 ± 0.006 is within 0.05, and not within 0.01; and better by 2, but not by more than 3."""
    ours, other = [0.50, 0.495, 0.50], [0.52, 0.52, 0.525]
    assert judged(ours, other) == "fails"
    assert judged(ours, other, margin=-0.05) == "holds"
    assert judged(ours, other, margin=-0.01) == "fails"
    assert judged([2, 2, 2.1], [0, 0, 0], margin=1) == "holds"
    assert judged([2, 2, 2.1], [0, 0, 0], margin=3) == "fails"


def test_there_is_no_verdict_without_headroom():
    """Full and StreamingLLM differ by 5, or by -1, 0 and 1; lower perplexity is better. Without both, it is not judged."""
    ours, other, measure = [5, 5, 5.1], [7, 7, 7], "perplexity"
    apart, alike = [6, 6, 6], [2, 1, 0]
    assert judged(ours, other, measure=measure, full=[1, 1, 1], streaming_llm=apart) == "holds"
    assert judged(other, ours, measure=measure, full=[1, 1, 1], streaming_llm=apart) == "fails"
    assert judged(ours, other, measure=measure, full=[1, 1, 1], streaming_llm=alike) == "no headroom"
    assert judged(ours, other, measure=measure, full=[1, 1, 1]) == "not judged"


def test_there_is_no_verdict_by_another_measure_than_the_papers():
    samples = [5, 5, 5.1], [1, 1, 1]
    assert judged(*samples, own="LongBench") == "proxy"
    assert judged(*samples, measure="agreement", own="RULER") == "proxy"
    assert judged(*samples, measure="attention cosine", own="layers") == "proxy"
    bounded = Claim("says", "where", "paper", "recall", "attention recalled", "a", ("b", "c"), "x", bounds=("b",))
    rows = table(
        {"measure": "attention recalled", "method": name, "at": "x", "samples": [of] * 3}
        for name, of in (("a", 1), ("b", 9), ("c", 0))
    )
    assert [pair.verdict(rows) for pair in bounded.pairs] == ["bound", "holds"]


T_QUANTILES = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646}
"""Student's t beyond which 2.5 % lie, by degrees of freedom, from printed tables."""


def test_verdicts_agree_with_the_definition():
    rng = np.random.default_rng(0)
    for _ in range(300):
        count, margin = int(rng.integers(2, 9)), float(rng.normal())
        ours, other = rng.normal(size=(2, count))
        differences = [float(a - b) - margin for a, b in zip(ours, other, strict=True)]
        mean = sum(differences) / count
        error = (sum((d - mean) ** 2 for d in differences) / (count - 1) / count) ** 0.5
        expected = "undecided" if abs(mean) <= T_QUANTILES[count - 1] * error else "holds" if mean > 0 else "fails"
        assert judged(ours.tolist(), other.tolist(), margin=margin) == expected


def test_no_runs_are_counted_twice():
    """Of the same two methods at the same place, one measure at most gets a verdict; and there are thirty that do."""
    counted = [
        (name, claim.method, pair.other, claim.at)
        for name, module in SECTIONS.items()
        for claim in module.CLAIMS
        for pair in claim.pairs
        if pair.counted
    ]
    assert len(set(counted)) == len(counted) >= 30


def test_no_claim_is_judged_in_two_sections():
    judged = defaultdict(set)
    for name, module in SECTIONS.items():
        for claim in module.CLAIMS:
            for pair in claim.pairs:
                if pair.counted:
                    judged[name.split("_")[0], claim.where, claim.method, pair.other].add(name)
    assert {key: names for key, names in judged.items() if len(names) > 1} == {}


def made_up(claims, samples: int = 3) -> list[dict]:
    """Rows for all that these claims are about, and for their headroom, with numbers from their names."""
    keys = {
        (claim.measure, name, claim.at) for claim in claims for name in (claim.method, *claim.others, FULL, STREAMING)
    }
    return [
        {"measure": measure, "method": name, "at": at, "samples": [len(name) + i / 8 for i in range(samples)]}
        for measure, name, at in sorted(keys)
    ]


def content(sections: dict) -> dict:
    """A result file's content."""
    header = {
        "device": "1 x abacus",
        "versions": {"jax": "9.9"},
        "settings": {"model": "toy", "fingerprint": "f", "dtype": "float32"},
    }
    rows = [
        {"section": name, "seconds": 1.0, "settings": {"books": 3}, "rows": rows} for name, rows in sections.items()
    ]
    return {"header": header, "rows": rows}


def test_the_page_of_made_up_numbers():
    claims = SECTIONS["treekv"].CLAIMS
    pages = page.render([content({"treekv": made_up(claims)})])
    treekv, first = pages["claims/treekv.md"], pages["reproduction.md"]
    assert "toy (`f`) in float32 on 1 x abacus; jax 9.9" in first
    assert "Means with toy (books 3; 3 samples):" in treekv
    # Lower is better; a name's length is its number: tova 4 < treekv 6 < streaming_llm 13, h2o 3, full 4.
    rule = "perplexity of `treekv` no more than 0.02 worse than that of `tova` (4096 tokens)"
    assert f"| 2 | {rule} | 6.12, 4.12 (difference 2.00 ± 0.63) | fails |" in treekv
    assert "| [TreeKV](claims/treekv.md) | toy | 3 | 9 | 0 | 0 |" in first
    assert "| `streaming_llm` | 13.12 | 13.12 | 13.12 | 13.12 |" in treekv
    assert first.count("compares one method with one other") == 1


def test_models_stand_side_by_side():
    claims = SECTIONS["treekv"].CLAIMS
    first, second = content({"treekv": made_up(claims)}), content({"treekv": made_up(claims)})
    second["header"]["settings"]["model"] = "doll.gguf"
    second["rows"][0]["rows"] = second["rows"][0]["rows"][:1]
    pages = page.render([first, second])
    assert "| rule | toy | verdict | doll | verdict |" in pages["claims/treekv.md"]
    assert "Means with doll (" in pages["claims/treekv.md"]
    assert pages["reproduction.md"].index("toy (`f`)") < pages["reproduction.md"].index("doll.gguf (`f`)")


def test_a_section_shows_models_that_it_was_measured_with():
    claims = SECTIONS["treekv"].CLAIMS
    first, second = content({"treekv": made_up(claims)}), content({})
    second["header"]["settings"]["model"] = "doll.gguf"
    pages = page.render([first, second])
    assert "| rule | toy | verdict |\n" in pages["claims/treekv.md"]
    assert "doll" not in pages["claims/treekv.md"]


def test_every_claim_is_on_a_page():
    """Measured ones on the page of their paper, with what the paper reports; the others in the list on the first page, and only there."""
    everything = content({name: made_up(module.CLAIMS) for name, module in reversed(SECTIONS.items())})
    pages, none = page.render([everything]), page.render([content({})])
    assert pages == page.render([json.loads(json.dumps(everything))])
    for name, module in SECTIONS.items():
        text = f"claims/{page.paper_of(name)}.md"
        for claim in module.CLAIMS:
            assert f". {claim.says}. *{claim.where}:* {claim.paper}" in pages[text]
            assert f"\n- {claim.says} (" in none["reproduction.md"]
            assert claim.says not in none[text]
    assert not [
        line for line in pages["reproduction.md"].partition("## Not measured")[2].splitlines() if line.startswith("- ")
    ]


def test_places_are_in_the_list_unless_the_claim_names_them():
    text = page.render([content({})])["reproduction.md"]
    assert "\n- At 8192 tokens CateKV is comparable with full attention (Table 1; RULER score).\n" in text
    assert "\n- Chunks of 16 do about as well as chunks of 256 (Table 4; LongBench score, cache of 20 %).\n" in text


def test_measures_are_explained_where_they_are_shown():
    """Those with a meaning, in each section that has them in a table, and in no other."""
    claims = SECTIONS["chunkkv_reading"].CLAIMS
    sections = {"chunkkv_reading": made_up(claims), "chunkkv_needle": made_up(SECTIONS["chunkkv_needle"].CLAIMS)}
    _, needles, reading = page.render([content(sections)])["claims/chunkkv.md"].split("\n## ")
    assert f"\n*Agreement*: {MEASURES['agreement'].meaning}.\n" in reading
    assert "*Agreement*" not in needles


def test_a_claim_that_is_measured_in_part_is_on_both_pages():
    claim = SECTIONS["treekv"].CLAIMS[0]
    rows = [row for row in made_up([claim]) if row["method"] != "h2o"]
    pages = page.render([content({"treekv": rows})])
    assert f"\n- {claim.says}, against `h2o` (" in pages["reproduction.md"]
    assert "lower than that of `streaming_llm` (4096 tokens)" in pages["claims/treekv.md"]
    assert "lower than that of `h2o`" not in pages["claims/treekv.md"]


def test_the_pages_are_the_result_files():
    """A file of results for each model, and no page that is not made from them."""
    assert sorted(papers.recorded()) == RESULTS
    contents = [report.read(path) for path in papers.recorded()]
    pages = page.render(contents)
    for name, text in pages.items():
        assert (papers.DOCS / name).read_text(encoding="utf-8") == text
    there = {str(path.relative_to(papers.DOCS)) for path in papers.DOCS.glob("claims/*")}
    assert there == set(pages) - {"reproduction.md"}
    assert page.model(contents[-1]).startswith("SmolLM2")


QWEN, SMOLLM2 = "Qwen2.5-Coder-1.5B", "SmolLM2-135M"


@pytest.fixture(scope="module")
def found():
    """Verdicts of a section with a model on comparisons with another method, in the order of the claims."""
    verdicts = page.verdicts([report.read(path) for path in papers.recorded()])

    def of(section: str, model: str, *others: str) -> list[str]:
        return [verdict for pair, verdict in verdicts[section, model] if not others or pair.other in others]

    return of


def timed(paper: str, *measures: str) -> set[str]:
    rows = times.recorded()["rows"]
    return {factor.verdict(rows) for factor in times.of(paper) if factor.measure in measures}


def test_conclusions_are_the_verdicts(found):
    """Each sentence of `CONCLUSIONS`, and that most comparisons hold."""
    assert set(page.CONCLUSIONS) == set(page.PAPERS)
    assert found("treekv", SMOLLM2) == ["holds", "undecided", *["holds"] * 7]
    assert found("treekv", QWEN) == []

    assert timed("chelsea", "TPOT", "memory") == {"holds"}
    assert found("chelsea_needle", SMOLLM2, "streaming_llm", "cam") == ["fails", "fails"]
    assert found("chelsea_needle", QWEN, "streaming_llm", "cam") == ["holds", "holds"]
    assert found("chelsea_needle", QWEN, "snapkv") == ["fails"]
    lines = (papers.DOCS / "leaderboard.md").read_text(encoding="utf-8").splitlines()
    scores = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0].strip("`") in ("chelsea", "snapkv", "streaming_llm"):
            scores.setdefault(cells[0].strip("`"), [float(cell.strip("*").split(" ")[0]) for cell in cells[1:3]])
    assert all(
        mine > max(others)
        for mine, *others in zip(scores["chelsea"], scores["snapkv"], scores["streaming_llm"], strict=True)
    )

    assert found("clusterkv_recall", QWEN, "quest") == ["undecided", *["holds"] * 3]
    assert found("clusterkv_recall", SMOLLM2, "quest") == ["holds"] * 4
    cosine = found("clusterkv_recall", QWEN, "clusterkv, inner product") + found(
        "clusterkv_recall", SMOLLM2, "clusterkv, inner product"
    )
    assert cosine.count("holds") > len(cosine) / 2
    assert not {"holds"} & {
        *found("clusterkv_recall", QWEN, "clusterkv, L2"),
        *found("clusterkv_recall", SMOLLM2, "clusterkv, L2"),
    }
    assert found("clusterkv_reading", QWEN) == ["holds"] * 3

    for model in (QWEN, SMOLLM2):
        assert found("chunkkv_needle", model, "h2o", "streaming_llm") == ["holds", "holds"]
    assert (found("chunkkv_needle", SMOLLM2, "snapkv"), found("chunkkv_needle", QWEN, "snapkv")) == (
        ["holds"],
        ["undecided"],
    )
    assert found("chunkkv_needle", SMOLLM2, "chunkkv, chunks of 30") == ["fails"]
    assert found("chunkkv_needle", QWEN, "chunkkv, chunks of 30") == ["undecided"]
    assert set(found("chunkkv_gsm8k", QWEN)) == {"no headroom"}
    (content,) = (report.read(path) for path in papers.recorded() if "qwen" in path.name)
    (solved,) = (table(row["rows"]) for row in content["rows"] if row["section"] == "chunkkv_gsm8k")
    for other in ("snapkv", "streaming_llm"):
        mine, its = (
            np.asarray(solved["GSM8K accuracy", name, "10 % of the prompt"].samples) for name in ("chunkkv", other)
        )
        mean, width = mean_interval(mine - its)
        assert mean + width < 0

    assert found("catekv_recall", QWEN, "quest") == found("catekv_recall", SMOLLM2, "quest") == ["holds"]
    assert timed("catekv", "TPOT", "memory") == {"holds"}

    everything = [verdict for name in SECTIONS for model in (QWEN, SMOLLM2) for verdict in found(name, model)]
    assert everything.count("holds") > everything.count("fails") + everything.count("undecided")


@pytest.fixture
def pretended(monkeypatch):
    """A bench of SmolLM2's shape at the real sizes, that runs no model: policies are checked, and numbers made up."""

    def continued(params, texts, prompt, policy):
        policy = get_policy(policy)
        policy.bind(params.config).validate(len(texts[0]))
        return [Continuation(Perplexity(np.asarray([-1.0])), np.asarray([1]))] * len(texts)

    def evaluated(params, task, policy, query_aware, batch):
        length = getattr(task, "length", getattr(task, "max_length", 2048))  # of GSM8K's eight examples
        policy.bind(params.config).validate(max(getattr(task, "lengths", (length,))))
        assert query_aware
        return SimpleNamespace(rows=[{"score": 1.0}] * batch)

    def losses(params, recorded, prompt, policy):
        policy.validate(len(prompt))
        return dict.fromkeys(("L1 loss of the cache", "attention cosine", "Jaccard of adjacent layers"), 1.0)

    def kept(params, recorded, prompt, policy):
        policy.bind(params.config).validate(len(prompt))
        return np.ones(3)

    def streamed(bench, policy, texts):
        policy.validate(len(texts[0]))
        return [Perplexity(-np.ones(len(text) - 1)) for text in texts]

    shape = PRESETS["smollm2-135m"]
    monkeypatch.setattr(bench.Bench, "pieces", lambda self, count, length, skip: [[0] * length] * count)
    monkeypatch.setattr(bench, "continuation", continued)
    monkeypatch.setattr(bench, "evaluate", evaluated)
    monkeypatch.setattr(chunkkv_layers, "losses", losses)
    monkeypatch.setattr(catekv_recall, "kept", kept)
    for name in ("recall", "page_recall", "top_recall"):
        monkeypatch.setattr(catekv_recall.heads, name, lambda *args: np.ones(3))
    for module in (chunkkv_layers, catekv_recall, clusterkv_lengths, clusterkv_recall):
        monkeypatch.setattr(module, "record", lambda params, text: [None] * shape.num_layers)
    monkeypatch.setattr(clusterkv_recall, "rate", lambda policy, layers, prompt: policy.validate(prompt) or 1.0)
    monkeypatch.setattr(treekv, "streamed", streamed)
    monkeypatch.setattr(treekv, "windowed", lambda params, text, window: Perplexity(-np.ones(window - 1)))
    monkeypatch.setattr(catekv_ratios, "cut", lambda *args: (np.zeros((2, 4)), "zeros"))
    scores = np.random.default_rng(1).normal(size=(2, shape.num_layers, shape.num_kv_heads))
    for module in (catekv_ratios, catekv_retained, catekv_ruler):
        monkeypatch.setattr(module, "head_scores", lambda *args: scores)
    monkeypatch.setattr(papers_tasks, "calibration", lambda *args: np.zeros((2, 4)))
    book = SimpleNamespace(read_text=lambda encoding: "A book.", name="book.txt")
    return bench.Bench(SimpleNamespace(config=shape), [book] * 8, book, small=False, threads=1)


@pytest.mark.parametrize("name", SECTIONS)
def test_claims_are_about_what_is_measured(name, pretended):
    """At the real sizes every claim finds its numbers, and all policies can work with their budgets."""
    measured = SECTIONS[name].measure(pretended)
    rows = table(vars(row) for row in measured.rows)
    assert len(rows) == len(measured.rows)
    for claim in SECTIONS[name].CLAIMS:
        assert not {pair.verdict(rows) for pair in claim.pairs} & {"not measured", "not judged"}, claim
        methods = claim.method, *claim.others
        assert len({len(rows[claim.measure, method, claim.at].samples) for method in methods}) == 1
    assert {row.measure for row in measured.rows} <= set(MEASURES)
    json.dumps(measured.settings)


def test_sections_are_chosen_by_paper():
    assert papers.chosen([]) == list(SECTIONS)
    assert papers.chosen(["catekv", "treekv"]) == [
        *("treekv", "treekv_longbench"),
        *("catekv_needle", "catekv_reading", "catekv_recall", "catekv_retained", "catekv_ruler"),
    ]
    with pytest.raises(SystemExit, match="no section streaming; there are treekv, treekv_longbench, chelsea"):
        papers.chosen(["streaming"])


@pytest.fixture
def command(pretended, monkeypatch, tmp_path):
    """Runs the program, and tells which sections its file has; of TreeKV's there is but one."""
    out = tmp_path / "results.json"
    sections = {name: module for name, module in SECTIONS.items() if name != "treekv_longbench"}
    monkeypatch.setattr(page, "sections", lambda: sections)
    header = {"date": "now", "device": "abacus", "versions": {}, "settings": {"model": "toy"}}
    monkeypatch.setattr(papers, "prepared", lambda args: (pretended, header))

    def run(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["reproduction", "--out", str(out), *options])
        papers.main()
        return [row["section"] for row in json.loads(out.read_text())["rows"]] if out.exists() else []

    return run, header


def test_sections_are_measured_once(command, capsys):
    """What another run has written stays, if it was made with the same, and is not measured again unless asked for."""
    run, header = command
    assert run("treekv") == ["treekv"]
    assert run("treekv", "chunkkv_layers") == ["treekv", "chunkkv_layers"]
    capsys.readouterr()
    assert run("treekv", "chunkkv_layers") == ["treekv", "chunkkv_layers"]
    assert capsys.readouterr().out == ""
    assert run("treekv", "--again") == ["chunkkv_layers", "treekv"]
    header["versions"] = {"jax": "2"}
    with pytest.raises(SystemExit, match="measured with other versions"):
        run("chelsea")


def test_claims_that_are_new_are_measured(command, monkeypatch, tmp_path):
    """A section is measured again if it has claims that it had not then, and but once."""
    run, _ = command
    run("treekv")
    out = tmp_path / "results.json"
    before = out.read_text()
    module = SECTIONS["treekv"]
    (claim, *rest) = module.CLAIMS
    added = dataclasses.replace(claim, others=("random",))
    monkeypatch.setattr(module, "CLAIMS", (*module.CLAIMS, added))
    assert papers.new_claims("treekv", json.loads(before)["rows"][0]) == [
        [claim.measure, claim.at, claim.method, "random"]
    ]
    assert run("treekv") == ["treekv"]
    once = out.read_text()
    assert once != before
    assert run("treekv") == ["treekv"]
    assert out.read_text() == once
    monkeypatch.setattr(module, "CLAIMS", (claim, *rest))
    old = json.loads(before)["rows"][0]
    del old["claims"]
    assert papers.new_claims("treekv", old) == []
    old["rows"] = old["rows"][1:]
    assert papers.new_claims("treekv", old) != []


def test_an_interrupted_section_goes_on(command, monkeypatch, capsys, tmp_path):
    """Out of time after two methods, the next run measures the others alone."""
    run, _ = command
    asked = []

    def streamed(bench, policy, texts):
        asked.append(policy.info.name)
        return [Perplexity(-np.ones(len(text) - 1)) for text in texts]

    monkeypatch.setattr(treekv, "streamed", streamed)
    now = iter([0.0, 1.0, 1.0, 9.0])
    monkeypatch.setattr(papers.time, "monotonic", lambda: next(now, 9.0))
    assert run("treekv", "--seconds", "5") == []
    assert "out of time in treekv" in capsys.readouterr().out
    assert asked == ["treekv", "treekv"]  # and its variant
    assert run("treekv") == ["treekv"]
    assert asked == ["treekv", "treekv", "tova", "h2o", "streaming_llm"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_small_sizes_need_a_file_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduction", "--small"])
    with pytest.raises(SystemExit):
        papers.main()
    assert "as --out" in capsys.readouterr().err


SOME = ["treekv", "clusterkv_recall", "chunkkv_layers", "chunkkv_reading", "catekv_recall"]
"""Sections that take seconds: perplexity and LongBench, recall, likeness of layers, continuations. Needles take longer."""


@pytest.mark.rotating
@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param([name], marks=pytest.mark.slow, id=name) for name in SOME),
        pytest.param(list(SECTIONS), marks=pytest.mark.long, id="all"),
    ],
)
@pytest.mark.filterwarnings("ignore:positions up to")  # whole prompts, of a model trained on short ones
def test_sections_run(names, shared, monkeypatch, tmp_path):
    """On a small real model and at small sizes; without DuoAttention, for which the model has no profile."""
    out, both = tmp_path / "small.json", catekv_ratios.methods

    def methods(*args):
        return {name: policy for name, policy in both(*args).items() if policy.info.name == "catekv"}

    monkeypatch.setattr(catekv_ratios, "methods", methods)
    model, texts, data = (str(shared / "data" / name) for name in ("models/stories260K-hf", "text", "tasks"))
    options = ["--small", "--model", model, "--texts", texts, "--data", data, "--threads", "2", "--out", str(out)]
    for name in names:
        monkeypatch.setattr(sys, "argv", ["reproduction", name, *options])
        papers.main()
        quick_programs.drop_programs()  # those of all sections are more than a process can map
    found = json.loads(out.read_text())
    assert [row["section"] for row in found["rows"]] == papers.chosen(names)
    for row in found["rows"]:
        assert all(np.isfinite(number["samples"]).all() for number in row["rows"])
    pages = page.render([found])
    for name in names:
        title = SECTIONS[name].TITLE.partition(": ")[2]
        assert f"## {title[0].upper()}{title[1:]}\n" in pages[f"claims/{page.paper_of(name)}.md"]
