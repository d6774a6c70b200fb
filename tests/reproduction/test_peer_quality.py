"""Both libraries' answers beside one another: by hand, and that every method that is asked of one is known to the other."""

import dataclasses
import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report
from kvjax.policies import KVzip
from reproduction import peer_presses, peer_quality
from reproduction.equal_bytes import merged


def test_answers_are_compared_in_pairs():
    """Of the differences 0.5, 0 and 0.5 the mean is 1/3, and its interval 4.303 (t of 2 degrees) times √(1/12 / 3) = 1/6."""
    prompts = [{"prompt": i, "task": "vt", "answers": ["AA", "BB"]} for i in range(4)]

    def answers(method: str, *texts: str) -> list[dict]:
        return [{"method": method, "prompt": i, "answer": text} for i, text in enumerate(texts)]

    ours = answers("tova", "AA BB", "aa", "AA", "AA") + answers("snapkv", "AA")
    theirs = answers("tova", "AA", "AA", "nothing") + answers("snapkv", " AA ")
    tova, snapkv = peer_quality.compared(prompts, ours, theirs)
    assert (tova["prompts"], tova["kvjax"], tova["kvpress"]) == (3, pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (tova["difference"], tova["interval"]) == (pytest.approx(1 / 3), pytest.approx(4.303 / 6, rel=1e-3))
    assert tova["within_sampling_error"]
    assert tova["same_answers"] == 0
    assert [each["prompt"] for each in tova["differing"]] == [0, 1, 2]
    assert "2 scores differ" in peer_quality.line(tova)
    assert (snapkv["same_answers"], snapkv["differing"], snapkv["interval"]) == (1, [], None)


def test_what_was_cut_short_goes_on(tmp_path):
    out, begin = tmp_path / "theirs.jsonl", {"versions": {"torch": "2"}, "prompts": "a"}
    assert peer_presses.begun(out, begin) == []
    whole = out.read_text()
    out.write_text(whole + '{"method": "tova", "prompt": 0, "answer": ""}\n{"method": "to')
    assert [row["prompt"] for row in peer_presses.begun(out, begin)] == [0]
    assert out.read_text().endswith("}\n")
    out.write_text("")
    assert peer_presses.begun(out, begin) == []
    with pytest.raises(SystemExit, match="was begun with"):
        peer_presses.begun(out, begin | {"prompts": "b"})


def test_new_tokens_are_kept_as_presses_keep_them():
    infos = [policy.info for name, policy in peer_quality.methods(256).items() if name != "full"]
    assert all(info.budget_excludes_new_tokens for info in infos)


def test_every_method_has_a_press():
    source = inspect.getsource(peer_presses.made)
    assert all(f'"{method.partition(",")[0]}"' in source for method in peer_quality.methods(256))


@pytest.mark.parametrize(("tokens", "kept"), [(3968, 1010), (3844, 1002)])
def test_lagkv_keeps_equally_many_of_each_segment(tokens, kept):
    """3968 tokens are 4 sinks, 30 segments and 124 more. The last segment is kept: 256 tokens, and 26 of each of 29 segments.

    Of 3844 tokens, 30 segments follow the sinks: 132 and 29 times 30.
    """
    assert peer_presses.evenly(tokens, 1024) == kept
    with pytest.raises(ValueError, match="scores no segment of 250 tokens within a budget of 64"):
        peer_presses.evenly(250, 64)


def test_rows_of_other_methods_stay(tmp_path):
    path = tmp_path / "results.json"
    header = {
        "device": "a GPU",
        "versions": {"jax": "1"},
        "settings": {"dtype": "float32", "methods": ["full", "tova"]},
        "peer": {"versions": {"kvpress": "1"}, "dtype": "float32"},
    }
    rows = [{"method": "full", "prompts": 1}, {"method": "tova", "prompts": 1}]
    report.write(path, {**header, "date": "then"}, rows)
    now = {**header, "date": "now", "settings": {"dtype": "float32", "methods": ["full", "lagkv"]}}
    new = [{"method": "full", "prompts": 2}, {"method": "lagkv", "prompts": 2}]
    merged, every = peer_quality.with_recorded(path, now, new)
    assert every == [{**new[0], "date": "now"}, rows[1], {**new[1], "date": "now"}]
    assert (merged["settings"]["methods"], merged["date"]) == (["full", "tova", "lagkv"], "then")
    with pytest.raises(SystemExit, match="has 1 answers of full, 0 are given"):
        peer_quality.with_recorded(path, now, [{"method": "full", "prompts": 0}])
    with pytest.raises(SystemExit, match=r"measured differently: versions .*'1'.*'2'"):
        peer_quality.with_recorded(path, {**now, "versions": {"jax": "2"}}, new)


def test_kvzip_evicts_the_templates_tokens_as_kvpress_does():
    """Of 5 tokens before the text only the 4 sinks are kept, and the 2 best of the text's 4 tokens. kvjax's default keeps all 5."""
    pressed = dataclasses.replace(peer_quality.methods(256)["kvzip"], budget=6)
    most = jnp.finfo(jnp.float32).max
    scores = jnp.asarray([most] * 5 + [0.1, 0.4, 0.2, 0.3], jnp.float32)[None, None, None]
    pos, budget = jnp.arange(9)[None, None], jnp.asarray([6])
    kept = [policy.shared_mask(scores, budget, pos, 9)[0, 0, 0].tolist() for policy in (pressed, KVzip(budget=6))]
    assert [int(each) for each in kept[0]] == [1, 1, 1, 1, 0, 0, 1, 0, 1]
    assert [int(each) for each in kept[1]] == [1, 1, 1, 1, 1, 0, 1, 0, 0]
    assert pressed.replay.then == "\n\nRepeat the part of the previous context exactly, starting with"


def test_answers_in_other_types_are_not_compared(tmp_path):
    settings = {"dtype": "float32", "prompts": "a"}
    (tmp_path / "prompts.jsonl").write_text("")
    (tmp_path / "ours.jsonl").write_text(json.dumps({"header": {"settings": settings}}) + "\n")
    for theirs in ({"prompts": "a"}, {"prompts": "a", "dtype": "bfloat16"}):
        (tmp_path / "theirs.jsonl").write_text(json.dumps(theirs) + "\n")
        with pytest.raises(SystemExit, match="kvjax has answered in float32, kvpress in bfloat16"):
            peer_quality.compare(tmp_path, None)


def test_the_section_tells_which_answers_kvpress_did_not_give():
    def row(method: str, prompts: int) -> dict:
        scores = {"kvjax": 0.5, "kvpress": 0.5}
        return {"method": method, "prompts": prompts, "same_answers": prompts, "differing": [], **scores}

    peer = {"versions": {"kvpress": "1", "torch": "2"}, "device": "a GPU"}
    header = {"settings": {"dtype": "float32"}, "peer": peer, "device": "1 x NVIDIA Abacus (gpu)"}
    told = peer_quality.exact_section({"header": header, "rows": [row("full", 5), row("tova", 4), row("keydiff", 2)]})
    assert "11 of 11 answers" in told
    assert "ended before it had given the other 4 (1 of `tova`, 3 of `keydiff`)." in told
    assert "the other" not in peer_quality.exact_section({"header": header, "rows": [row("full", 5), row("tova", 5)]})


def test_the_section_tells_which_answers_differ():
    def row(method: str, *differing: dict) -> dict:
        scores = {"kvjax": 0.5, "kvpress": 0.5}
        return {
            "method": method,
            "prompts": 2,
            "same_answers": 2 - len(differing),
            "differing": list(differing),
            **scores,
        }

    peer = {"versions": {"kvpress": "1", "torch": "2"}, "device": "a GPU"}
    header = {"settings": {"dtype": "float32"}, "peer": peer, "device": "1 x NVIDIA Abacus (gpu)"}
    one = {"prompt": 1, "task": "vt", "scores": [1, 1], "answers": ["A|B", " C\nD"]}
    counted = one | {"kept": 10, "only_here": 3, "kept_on": "cpu"}
    told = peer_quality.exact_section({"header": header, "rows": [row("full"), row("lagkv", counted)]})
    assert "3 of 4 answers that both" in told
    assert "All 2 answers of the methods above are the same" in told
    assert "| `lagkv` | 1 (`vt`) | A\\|B | C D |" in told
    assert "of 10 tokens that kvjax keeps in all KV heads, kvpress keeps 7 in a run of both libraries on cpu." in told
    told = peer_quality.exact_section({"header": header, "rows": [row("full", one), row("tova")]})
    assert "methods above" not in told
    assert "kvpress keeps" not in told


def test_kvzip_loses_less_without_a_limit_per_layer():
    """As docs/methods/kvzip.md says: in the five tasks of the comparison with kvpress, at a quarter of the prompt."""
    content = report.read(peer_quality.EXACT.file())
    tasks = list(content["header"]["settings"]["suite"]["tasks"])
    theirs = {row["method"]: row["kvjax"] for row in content["rows"]}

    def score(policy: str, target: float | None) -> float:
        rows = merged.first_samples(report.read(merged.recorded())["rows"])
        mine = [
            np.mean(merged.samples(row))
            for row in rows
            if (row["policy"], row["target"], row["seen"], row["task"] in tasks) == (policy, target, False, True)
            and "scores" in row
            and (target is None or merged.of(row) == "prompt")
        ]
        assert len(mine) == len(tasks)
        return float(np.mean(mine))

    assert theirs["full"] - theirs["kvzip"] < score("full", None) - score("kvzip", 0.25)
