"""The table at equal bytes: the order of the work, what a run writes, what is made of it, and that the page is the result file's."""

import csv
import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks import report
from kvjax.cache import bucket
from kvjax.evals import Example, Format, evaluate
from kvjax.evals.budgets import bytes_held
from kvjax.evals.report import read_rows
from kvjax.evals.ruler import Niah
from kvjax.policies import HeadProfile, get_policy
from kvjax.policies.profile import fingerprint
from kvjax.runtime import decoding
from reproduction import leaderboard
from reproduction.equal_bytes import batches, cells, export, merged, page
from reproduction.equal_bytes.batches import Clock
from reproduction.equal_bytes.suite import Asked, Suite
from reproduction.make_profiles import path as profile_path

HEADER = {
    "date": "2026-01-01",
    "device": "1 x abacus (cpu)",
    "versions": {"jax": "9.9"},
    "settings": {
        "model": "toy",
        "fingerprint": "f",
        "dtype": "float32",
        "chat": False,
        "seed": 0,
        "kind": "abacus (cpu)",
        "suites": {"ruler-64": {"prompt": 64, "question": 64, "new": 64, "tasks": {"vt": {}, "cwe": {}}}},
    },
}


def row(
    policy: str, task: str, scores: list[float], target: float | None = 0.5, first: int = 0, seen: bool = False
) -> dict:
    """A batch's row, of a part."""
    return {
        "suite": "ruler-64",
        "policy": policy,
        "target": target,
        "seen": seen,
        "task": task,
        "first": first,
        "settings": {"budget": 32},
        "held": 100 if target is None else 50,
        "full": 100,
        "scores": scores,
        "answers": [f"answer {score}" for score in scores],
        "references": [["a", "b"]] * len(scores),
        "prompt_tokens": [60] * len(scores),
        "prefill_seconds": 1.0,
        "decode_seconds": 1.0,
    }


def written(path: Path, rows: list[dict], header: dict = HEADER) -> Path:
    """A part."""
    path.write_text("".join(json.dumps(each) + "\n" for each in ({"header": header}, *rows)))
    return path


def test_means_and_errors_by_hand():
    """Means 0.5 and 1; of 0, 0, 1, 1 the standard error is √(1/3) / 2 = 0.289, of two tasks' mean half of it."""
    mean, error = merged.mean_and_error([np.asarray([0.0, 0, 1, 1, np.nan]), np.ones(3)])
    assert mean == 0.75
    assert error == pytest.approx((1 / 3) ** 0.5 / 4)
    assert np.isnan(merged.mean_and_error([np.ones(1)])[1])


def test_parts_make_one_table(tmp_path):
    one = written(tmp_path / "1", [row("snapkv", "vt", [1, 0], first=2), row("snapkv", "vt", [0.5, 0.5])])
    unable = {
        "suite": "ruler-64",
        "policy": "quest",
        "target": 0.5,
        "seen": False,
        "task": None,
        "first": 0,
        "why": "no",
    }
    two = written(tmp_path / "2", [row("snapkv", "cwe", [1, 1], first=1), unable, row("snapkv", "vt", [9, 9])])
    rows = {(each["policy"], each["task"]): each for each in merged.merge([one, two])["rows"]}
    assert rows["snapkv", "vt"]["scores"] == [0.5, 0.5, 1, 0]
    assert rows["snapkv", "cwe"]["scores"] == [None, 1, 1]
    assert rows["quest", None]["why"] == "no"
    assert "answers" not in rows["snapkv", "vt"]
    whole = merged.merge([one, two])
    recorded = tmp_path / "recorded.json"
    report.write(recorded, whole["header"], whole["rows"])
    assert merged.merge([recorded])["rows"] == whole["rows"]
    more = written(tmp_path / "more", [row("snapkv", "cwe", [0]), row("tova", "vt", [1])])
    rows = {(each["policy"], each["task"]): each for each in merged.merge([recorded, more])["rows"]}
    assert rows["snapkv", "cwe"]["scores"] == [0, 1, 1]
    assert rows["tova", "vt"]["scores"] == [1]
    other = HEADER | {"settings": HEADER["settings"] | {"seed": 1}}
    with pytest.raises(SystemExit, match="measured with other settings"):
        merged.merge([one, written(tmp_path / "3", [], other)])


def test_the_page_of_made_up_numbers(tmp_path):
    """snapkv is above streaming_llm in every sample, so it alone is bold; what it cannot hold is said."""
    rows = [row("full", task, [1.0, 1.0, 1.0], None) for task in ("vt", "cwe")]
    rows += [row("snapkv", task, [0.9, 0.8, 1.0]) for task in ("vt", "cwe")]
    rows += [row("streaming_llm", task, [0.1, 0.0, 0.3]) for task in ("vt", "cwe")]
    rows += [row("tova", "vt", [0.0, 0.0, 0.0])]
    rows += [{**row("quest", "vt", []), "task": None, "why": "needs at least 101.0 %"}]
    del rows[-1]["scores"]
    text = page.render(merged.merge([written(tmp_path / "part", rows)]), "leaderboard-abacus.json")
    assert "| `full` (100 %) | 100.0 ± 0.0 |" in text
    assert "| `snapkv` | **90.0 ± 4.1** (50.0 %) |" in text
    assert "| `streaming_llm` | 13.3 ± 6.2 (50.0 %) |" in text
    assert "| `tova` | 1 of 2 tasks |" in text
    assert "- `quest`, at 50 %: needs at least 101.0 %" in text
    assert "| `streaming_llm` | 13.3 | 13 | 13 |\n| `tova` |  | 0 |  |" in text
    assert "--policies snapkv,streaming_llm,tova,quest" in text
    assert "3 samples of each task" in text
    assert re.search(r"^Not run: (?!.*`(snapkv|streaming_llm|tova|quest)`).*`kivi`", text, flags=re.MULTILINE)
    assert "No headroom" not in text
    for each in rows:
        if each["policy"] == "full":
            each["scores"] = [0.5, 0.6, 0.5]
        if each["policy"] == "streaming_llm":
            each["scores"] = [0.6, 0.5, 0.6]
    text = page.render(merged.merge([written(tmp_path / "part", rows)]), "leaderboard-abacus.json")
    assert "No headroom at 50 %: the full cache" in text
    assert "| `snapkv` | 90.0 ± 4.1 (50.0 %) |" in text
    for each in rows:
        if each["policy"] == "full":
            each["scores"] = [0.5, 0.4, 0.5]
    text = page.render(merged.merge([written(tmp_path / "part", rows)]), "leaderboard-abacus.json")
    assert "The full cache scores less than 50 % in all of them" in text


def test_the_page_says_what_was_asked_and_what_was_not_reached(tmp_path):
    """Cells without a score or a reason are named, and questions in sight where there are such columns; the command asks the same."""

    def rendered(rows: list[dict], tasks: dict) -> str:
        settings = HEADER["settings"]
        suites = {"ruler-64": settings["suites"]["ruler-64"] | {"tasks": tasks}}
        header = HEADER | {"settings": settings | {"suites": suites}}
        return page.render(merged.merge([written(tmp_path / "part", rows, header)]), "leaderboard-abacus.json")

    rows = [row("full", "vt", [1.0, 1.0], None)]
    rows += [row(policy, "vt", [1.0, 0.5]) for policy in ("snapkv", "chunkkv", "tova")]
    text = rendered(rows, {"vt": {}})
    assert "Cells are empty" not in text
    assert "*Question-aware*" not in text
    assert '--seeing ""' in text
    assert "--qa" not in text
    unable = {**row("quest", "vt", [], 0.25), "task": None, "why": "needs at least 101.0 %"}
    del unable["scores"]
    rows += [row(policy, "vt", [1.0, 0.5], 0.25) for policy in ("snapkv", "chunkkv")]
    rows += [row(policy, "vt", [1.0, 0.5], seen=True) for policy in ("snapkv", "tova")]
    rows += [row("snapkv", "vt", [1.0, 0.5], 0.25, seen=True)]
    text = rendered([*rows, unable, unable | {"target": 0.5}], {"vt": {}, "qa_2": {"data": "hotpot.json"}})
    assert "Not measured yet: `tova` (25 %, question-agnostic)." in text
    assert "Not shown, as too few policies have been measured: 25 %, question-aware (1 of 2)." in text
    assert "*Question-aware*" in text
    assert '--seeing "snapkv,tova"' in text
    assert "--qa-2 hotpot.json" in text
    assert "--qa-1" not in text


def test_a_convention_of_which_little_was_measured_has_no_table(tmp_path):
    rows = [row("full", "vt", [1.0, 1.0], None), row("snapkv", "vt", [1.0, 0.5])]
    rows += [{**row(policy, "vt", [1.0, 0.5]), "task": None, "why": "no"} for policy in ("tova", "h2o")]
    rows += [{**row("snapkv", "vt", [1.0, 0.5], 0.25), "of": "prompt"}]
    assert page._more_samples([each for each in rows if "why" in each], ["vt"], "no scores") == []
    text = page.render(merged.merge([written(tmp_path / "a", rows)]), "file.json")
    held, kept = text.split("### ruler-64, equal bytes\n")[1].split("### ruler-64, equal shares of the prompt\n")
    assert "| `snapkv` |" in held
    assert "Not shown, as too few policies have been measured: 25 %, question-agnostic (1 of 3)." in kept
    assert "| `" not in kept


def test_what_drops_no_tokens_is_named(tmp_path):
    """Codes of all tokens may fit a share. Of policies in others, the budget is in their text."""
    rows = [row("full", "vt", [1.0, 1.0], None)]
    rows += [row("snapkv", "vt", [1.0, 0.5], target) | {"settings": {"budget": 2 * target}} for target in (0.5, 0.25)]
    inner = {"settings": {"policy": "snapkv:budget=1.0", "bits": 4}}
    rows += [row("quantized(snapkv; bits=4)", "vt", [1.0, 0.5], target) | inner for target in (0.5, 0.25)]
    text = page.render(merged.merge([written(tmp_path / "a", rows)]), "file.json")
    assert (
        "Nothing is dropped here, since all tokens fit: `snapkv` at 50 %, `quantized(snapkv; bits=4)` at 50 % and 25 %.\n"
    ) in text


def test_reasons_name_the_prompts_that_they_are_for(tmp_path):
    """Prompts with and without the question may need different shares."""
    unable = {**row("tova", "vt", [], 0.25), "task": None, "why": "needs 26 %"}
    del unable["scores"]
    rows = [row("full", "vt", [1.0, 1.0], None)]
    rows += [row("snapkv", "vt", [1.0, 0.5], target, seen=seen) for target in (0.5, 0.25) for seen in (False, True)]
    rows += [unable, unable | {"seen": True, "why": "needs 27 %"}]
    rows += [unable | {"policy": "h2o", "seen": seen, "why": "never"} for seen in (False, True)]
    text = page.render(merged.merge([written(tmp_path / "a", rows)]), "file.json")
    assert (
        "- `tova`, at 25 %, question-agnostic: needs 26 %\n"
        "- `tova`, at 25 %, question-aware: needs 27 %\n"
        "- `h2o`, at 25 %: never\n"
    ) in text


def test_each_convention_has_its_table(tmp_path):
    """Rows at shares of the prompt are beside those at shares of bytes, and tasks that the full cache cannot do do not count."""
    rows = [row("full", "vt", [1.0] * 20, None), row("full", "cwe", [0.0] * 19 + [1.0], None)]
    for policy, score in (("snapkv", 1.0), ("tova", 0.5)):
        rows += [row(policy, task, [score] * 20) for task in ("vt", "cwe")]
        for seen in (False, True):
            rows += [{**row(policy, task, [score / 2] * 20, 0.25, seen=seen), "of": "prompt"} for task in ("vt", "cwe")]
    text = page.render(merged.merge([written(tmp_path / "a", rows)]), "file.json")
    assert "Means leave out cwe, where the full cache scores less than 50 %" in text
    held, kept = text.split("### ruler-64, equal bytes\n")[1].split("### ruler-64, equal shares of the prompt\n")
    assert "| `snapkv` | **100.0 ± 0.0** (50.0 %) |" in held
    near = "**Not significantly below the full cache, question-agnostic, with their fewest bytes:**"
    assert f"\n{near} `snapkv` (50.0 %).\n" in held
    assert near not in kept
    assert "| policy | 25 %, question-agnostic | 25 %, question-aware |" in kept
    assert "| `snapkv` | **50.0 ± 0.0** (50.0 %) | **50.0 ± 0.0** (50.0 %) |" in kept
    assert '--shares 0.5 --prompt-shares 0.25 --read-shares ""' in text
    assert "--seeing" not in text  # by default all are asked both ways at shares of the prompt, and only there


def test_policies_are_compared_on_the_samples_that_most_have(tmp_path):
    """Two of three policies were asked four samples in place of two. The table has two of each, and another one has the four."""
    rows = [row("full", "vt", [1.0] * 4, None), row("h2o", "vt", [0.5] * 2)]
    rows += [row(policy, "vt", [1.0, 1.0, 0.0, 0.0]) for policy in ("snapkv", "tova")]
    rows += [row(policy, "vt", [0.0] * 2, 0.25) for policy in ("snapkv", "tova", "h2o")]
    text = page.render(merged.merge([written(tmp_path / "a", rows)]), "file.json")
    usual, longer = text.split("### ruler-64, equal bytes, with 4 samples of each task\n")
    assert "2 samples of each task, and 4 for some policies." in usual
    assert "--samples 2 " in usual
    assert "| `snapkv` | **100.0 ± 0.0** (50.0 %) | **0.0 ± 0.0** (50.0 %) |" in usual
    assert "| `snapkv` | 50.0 ± 28.9 (50.0 %) |\n| `tova` | 50.0 ± 28.9 (50.0 %) |\n" in longer
    assert "| `h2o`" not in longer
    assert "Best at" not in longer


def test_kvpress_finds_what_it_expects(tmp_path):
    """Names, files and columns of its `evaluate.py`, and scores in percent."""
    rows = [row("h2o", "vt", [1.0, 0.5]), row("h2o", "vt", [0.0], first=2), row("full", "vt", [1.0], None)]
    rows += [row("h2o", "vt", [1.0], seen=True)]
    part = written(tmp_path / "part", rows)
    folders = [path.name for path in export.write(tmp_path / "out", [part])]
    press = "ruler__64__toy__observed_attention__0.50"
    assert folders == [press, "ruler__64__toy__no_press__0.00", f"{press}__query_aware"]
    again = written(tmp_path / "again", [row("h2o", "vt", [0.5, 0.0], first=1)])  # what another batch has asked, too
    export.write(tmp_path / "out", [part, again])
    folder = tmp_path / "out" / press
    assert json.loads((folder / "metrics.json").read_text()) == {"vt": {"string_match": 50.0}}
    with (folder / "predictions.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [each["predicted_answer"] for each in found] == ["answer 1.0", "answer 0.5", "answer 0.0"]
    assert {each["compression_ratio"] for each in found} == {"0.5000"}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["dataset"], config["data_dir"], config["press_name"]) == ("ruler", "64", "observed_attention")
    assert (config["compression_ratio"], config["query_aware"]) == (0.5, False)


def test_samples_are_asked_once_whatever_the_batch():
    small, large = row("snapkv", "vt", [1, 0]), row("snapkv", "vt", [1, 0, 1])
    assert leaderboard.samples_of(small, 2) < leaderboard.samples_of(large, 3)
    assert leaderboard.samples_of(small | {"first": 2}, 1) <= leaderboard.samples_of(large, 3)
    assert not leaderboard.samples_of(small, 2) & leaderboard.samples_of(small | {"seen": True}, 2)


def test_parts_of_other_budgets_are_refused(tmp_path):
    one = written(tmp_path / "1", [row("snapkv", "vt", [1.0])])
    other = written(tmp_path / "2", [row("snapkv", "vt", [1.0], first=1) | {"held": 1}])
    with pytest.raises(SystemExit, match="held is 1 in one part"):
        merged.merge([one, other])


@pytest.fixture
def uneven(talker, monkeypatch):
    """A suite of two tasks with prompts of 500 to 4000 tokens, questions of 60 and answers of 40 or 300."""
    asked = {
        name: Asked(
            None,
            [Example("", "?", (), most, stop=stop) for _ in lengths],
            [([1] * length, [1] * 60) for length in lengths],
        )
        for name, lengths, most, stop in (("short", [500, 900, 1000], 40, ()), ("long", [3000, 3900, 4000], 300, ()))
    }
    suite = Suite("longbench-4096", {}, 4096, Format(talker.tokenizer, False), 8192)
    monkeypatch.setitem(suite.__dict__, "asked", asked)
    return suite


def test_rows_hold_a_share_of_what_they_hold_in_full(talker, uneven):
    """Counted one by one, short rows as well as long ones; question and answer have room once, seen or not."""
    assert (uneven.new(False), uneven.new(True)) == (bucket(360), bucket(300))
    assert (uneven.longest(False), uneven.longest(True)) == (4000, 4060)
    assert uneven.lengths(False) == (512, 1024, 3072, 4096)  # of the 1st, 3rd, 4th and 6th of six
    for policy, seen in (("tova", False), ("snapkv", False), ("snapkv", True)):
        (_, *found) = cells.cells(talker, cells.wanted(uneven, [policy], {"bytes": [0.5]}, ["snapkv"]))
        cell = next(each for each in found if each.seen is seen)
        assert isinstance(cell.fitted.budget, float)
        held, full = [], []
        for length in (512, 1024, 3072, 4096):
            new = uneven.new(seen)
            sizes = talker.config, length, new, talker.dtype
            held.append(bytes_held(cell.fitted, *sizes))
            full.append(bytes_held(get_policy("full"), *sizes))
        assert sum(held) / sum(full) == pytest.approx(0.5, rel=0.05), policy
        assert held[0] < 0.85 * full[0], policy  # slots in tokens that are half of the mean row are all of this one
        assert cell.held <= cells.ABOVE * 0.5 * cell.full
    full = {each.seen: each.full for each in found}
    assert full[True] == pytest.approx(full[False], rel=0.05)


def test_budgets_are_found_once(talker, uneven, tmp_path, monkeypatch):
    """What a file has is not sought again, also after its last line was cut short; where there was none, there may be one now."""
    entries = cells.wanted(uneven, ["tova", "catekv"], {"bytes": [0.5]}, [])
    path = tmp_path / "budgets.jsonl"
    first = cells.cells(talker, entries, cells.Budgets(path, "model", cells.Maker(talker.config)))
    lines = path.read_text().splitlines(keepends=True)
    assert [cell.why == "" for cell in first] == [True, True, False]
    assert len(lines) == 2  # not that there is no profile
    path.write_text("".join(lines) + lines[0][:20])
    monkeypatch.setattr(cells, "_largest", lambda *_: pytest.fail("sought again"))
    again = cells.cells(talker, entries[:2], cells.Budgets(path, "model", cells.Maker(talker.config)))
    assert [(cell.fitted, cell.held, cell.full) for cell in again] == [
        (cell.fitted, cell.held, cell.full) for cell in first[:2]
    ]
    assert path.read_text() == "".join(lines)
    assert cells.Budgets(path, "another", cells.Maker(talker.config)).get(entries[1]) is None


def test_policies_that_need_a_profile_take_it_from_a_folder(talker, uneven, tmp_path, monkeypatch):
    """Inside other policies too, and for budgets that a file has; the file does not name the profile."""
    config = talker.config
    labels = (("adaptive",) * (config.num_kv_heads - 1) + ("consistent",),) * config.num_layers
    scores = ((0.5,) * config.num_kv_heads,) * config.num_layers
    file = profile_path(tmp_path, "catekv", config)
    HeadProfile("catekv", fingerprint(config), "text", (), scores, labels).save(file)
    make = cells.Maker(config, tmp_path)
    assert make("catekv").profile == make("prompt_only(catekv)").policy.profile == str(file)
    assert make("snapkv") == get_policy("snapkv")
    entries, path = cells.wanted(uneven, ["catekv"], {"bytes": [0.9]}, []), tmp_path / "budgets.jsonl"
    _, found = cells.cells(talker, entries, cells.Budgets(path, "model", make), make)
    assert found.fitted.profile == str(file)
    assert str(tmp_path) not in path.read_text()
    assert batches._settings(found.fitted)["profile"] == file.name
    own = dataclasses.replace(found.fitted, profile=str(tmp_path / "own.json"))
    assert make.bare(own) == own
    monkeypatch.setattr(cells, "_largest", lambda *_: pytest.fail("sought again"))
    _, again = cells.cells(talker, entries, cells.Budgets(path, "model", make), make)
    assert again.fitted == found.fitted
    _, without = cells.cells(talker, entries, cells.Budgets(path, "model", cells.Maker(config)))
    assert "no profile" in without.why
    HeadProfile("catekv", fingerprint(config), "another text", (), scores, labels).save(file)
    assert cells.Budgets(path, "model", make).get(entries[1]) is None


def test_budgets_inside_a_transform_and_schemes_without_eight_bits(talker, uneven):
    """The budget of what a transform is around is fitted, and where a scheme has no codes of 8 bits, its others are tried."""
    entries = cells.wanted(uneven, ["critical(snapkv)", "turboquant"], {"bytes": [0.5]}, [])
    _, critical, turboquant = cells.cells(talker, entries)
    assert critical.why == ""
    assert 0 < critical.fitted.policy.budget < 0.5
    assert critical.held <= cells.ABOVE * 0.5 * critical.full
    assert turboquant.fitted.bits in (2, 4)
    assert "codes" not in turboquant.why


def test_a_share_of_the_prompt_is_kept_and_new_tokens_in_addition(talker, uneven):
    """Of each prompt alike, with the question if it is seen; a policy that compresses while decoding compresses the prompt alone."""
    entries = cells.wanted(uneven, ["snapkv", "tova", "kivi", "quest"], {"prompt": [0.25], "read": [0.125]}, None)
    assert [(entry.policy, entry.seen, entry.of) for entry in entries[1:]] == [
        ("snapkv", False, "prompt"),
        ("snapkv", True, "prompt"),
        ("tova", False, "prompt"),
        ("tova", True, "prompt"),
        ("quest", False, "read"),
    ]
    _, unseen, seen, tova, _, quest = cells.cells(talker, entries)
    assert unseen.fitted.budget == pytest.approx(0.25 * uneven.prompt_share(False), rel=0.01)
    assert seen.fitted.budget > unseen.fitted.budget
    assert str(tova.fitted).startswith("prompt_only(tova")
    assert quest.fitted.budget == pytest.approx(0.125 * uneven.prompt_share(False), rel=0.01)
    assert quest.why == unseen.why == ""
    held, whole = (
        bytes_held(unseen.fitted, talker.config, length, 512, talker.dtype) / talker.config.cache_bytes_per_token(4)
        for length in (1024, 3072)
    )
    share = unseen.fitted.budget
    assert held == pytest.approx(share * (1024 + 512) + 512, rel=0.2)
    assert whole == pytest.approx(share * (3072 + 512) + 512, rel=0.2)


def test_heads_that_keep_everything_count(talker, uneven):
    """A policy with such heads keeps less in the others, and is not run at shares that these heads alone exceed."""
    heads = (("consistent", "adaptive"),) * talker.config.num_layers
    policy = str(get_policy("catekv", profile=heads))
    _, most, least = cells.cells(talker, cells.wanted(uneven, [policy], {"prompt": [0.75, 0.25]}, []))
    assert most.why == ""
    prompt = uneven.prompt_share(False)
    assert most.held == pytest.approx((0.75 * prompt + 1 - prompt) * most.full, rel=0.02)
    assert least.why.startswith("needs at least 5")


def test_all_that_answers_take_is_compiled_ahead(talker, uneven):
    """Also for answers of more tokens than one call returns, or that end at a string."""
    (cell,) = cells.cells(talker, cells.wanted(uneven, [], {}, []))
    cell = dataclasses.replace(cell, fitted=get_policy("full"))
    engine = batches.Roomy(talker, cell.fitted, cell.suite, 1, cell.seen)
    engine.compile_all()
    compiled = decoding.decode.compile_seconds, decoding.answer.compile_seconds, decoding.prefill.compile_seconds
    engine.executables(given=engine.given)
    again = decoding.decode.compile_seconds, decoding.answer.compile_seconds, decoding.prefill.compile_seconds
    assert again == compiled


def test_parts_deal_everything_once():
    planned = list(range(11))
    sharded = [leaderboard.part(planned, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*sharded)) == planned
    with pytest.raises(SystemExit, match="give I/N"):
        leaderboard.part(planned, "4/3")


def test_a_clock_stops_before_the_time_is_up(monkeypatch):
    now = 0.0
    monkeypatch.setattr(batches.time, "monotonic", lambda: now)
    clock = Clock(10)
    assert clock.allows("run")
    clock.took("run", 4)
    clock.took("turn", 3)
    now = 5.0
    assert clock.allows("run")
    assert not clock.allows("run", "turn")
    now = 6.0
    assert not clock.allows("run")
    assert Clock(None).allows("run")


@pytest.fixture
def command(talker, shared, monkeypatch, tmp_path):
    """Runs the program on a small random model, and tells the rows it has written."""
    monkeypatch.setattr(leaderboard.kvjax, "load", lambda model, dtype: talker)
    sizes = ["--suites", "ruler-1024", "--tasks", "niah_single_1,niah_multikey_1", "--policies", "snapkv,quest"]
    sizes += [
        "--shares",
        "0.5",
        "--prompt-shares",
        "",
        "--read-shares",
        "",
        "--seeing",
        "snapkv",
        "--samples",
        "3",
        "--batch",
        "2",
        "--ahead",
        "1",
        "--data",
        str(shared / "data/tasks"),
    ]
    sizes += ["--text", str(shared / "data/text/books/1661_The_Adventures_of_Sherlock_Holmes.txt")]

    def run(*options: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["leaderboard", *sizes, "--out", str(tmp_path / "part"), *options])
        leaderboard.main()
        return read_rows(tmp_path / "part")

    return run


@pytest.mark.slow
def test_runs_go_round_and_go_on(command, talker, capsys):
    """Each policy's first samples before any one's next; a run that is cut short goes on; answers are those of `evaluate`."""
    assert [each["why"] != "" for each in command("--seconds", "0")] == [True]  # Quest keeps everything
    assert "12 batches left" in capsys.readouterr().out
    rows = command()
    ran = [each for each in rows if each["task"] is not None]
    assert len(ran) == 12
    assert command() == rows
    firsts = [each["first"] for each in ran]
    assert firsts == sorted(firsts)
    assert {len(each["scores"]) for each in ran if each["first"] == 2} == {1}
    for each in ran:
        assert each["held"] <= (1 if each["target"] is None else cells.ABOVE * each["target"]) * each["full"]
    task = Niah(length=1024, samples=3, task="niah_single_1")
    for seen in (False, True):
        mine = [each for each in ran if (each["policy"], each["task"], each["seen"]) == ("snapkv", task.name, seen)]
        expected = evaluate(talker, task, get_policy("snapkv", budget=mine[0]["settings"]["budget"]), query_aware=seen)
        assert list(itertools.chain(*(each["answers"] for each in mine))) == [each["answer"] for each in expected.rows]


@pytest.mark.slow
def test_shares_of_the_prompt_run_with_the_question_and_without(command, tmp_path):
    options = ["--shares", "", "--prompt-shares", "0.25", "--read-shares", "0.5", "--policies", "tova,quest"]
    ran = command(*options, "--tasks", "niah_single_1", "--samples", "2", "--seeing", "tova")
    assert [(each["policy"], each.get("of"), each["seen"]) for each in ran] == [
        ("full", None, False),
        ("tova", "prompt", False),
        ("tova", "prompt", True),
        ("quest", "read", False),
    ]
    assert all(len(each["scores"]) == 2 for each in ran)
    assert "of" in merged.merge([tmp_path / "part"])["rows"][1]


def test_the_page_is_the_result_files():
    """One file of results, one page and one picture."""
    path = merged.recorded()
    assert (page.DOCS / "leaderboard.md").read_text(encoding="utf-8") == page.render(report.read(path), path.name)
    assert (page.DOCS / page.PICTURE).stat().st_size > 10_000
