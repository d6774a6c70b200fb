"""`kvjax bench`: what rows say, what becomes of cases that fail, and runs that go on."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

import kvjax
from benchmarks import beside, decode, long_context, peers, several_devices
from kvjax.bench import compression, figures, floor, measure, states
from kvjax.bench.case import Case, read_policy
from kvjax.bench.runner import environments, run
from kvjax.cache import layer_specs
from kvjax.cli.bench import read_cases
from kvjax.config import presets
from kvjax.models import Params, init
from kvjax.policies import get_policy

WORKER = """
import json, os, sys, time
from kvjax.bench.worker import serve
def measure(case):
    print("noise")
    if case["policy"] == "raises": raise MemoryError("RESOURCE_EXHAUSTED")
    if case["policy"] == "dies": print("last words", file=sys.stderr); os._exit(3)
    if case["policy"] == "hangs": time.sleep(60)
    return {"tpot_ms": case["context"] / 100, "pid": os.getpid()}
serve(lambda: {"device": "one", "versions": {}, "settings": {}}, measure)
"""

SHARING = """
import json, os, sys, time
from pathlib import Path
folder, device, pid = Path(sys.argv[1]), os.environ.get("CUDA_VISIBLE_DEVICES"), str(os.getpid())
begun, died, once = folder / f"begun-{device}", folder / "died", os.environ.get("ONCE", "").split(",")
if begun.exists() and device in once: sys.exit("not again")
begun.touch()
def until(reached):
    while not reached(): time.sleep(0.01)
def lives(other):
    try: os.kill(int(other), 0)
    except ProcessLookupError: return False
    return True
def measured(policy):
    (folder / "pids" / pid).touch()
    if policy == "meets": until(lambda: len(os.listdir(folder / "pids")) > 1)
    if policy == "waits": time.sleep(60)
    if policy == "dies on 1" and device == "0": until(died.exists)
    elif policy.startswith("dies"): died.touch(); os._exit(3)
    beside = sum(map(lives, os.listdir(folder / "pids"))) - 1
    apart = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    return {"on": device, "pid": pid, "beside": beside, "compile_s": 0, "failed": f"{device} {apart}"}
kind = "another" if device == os.environ.get("UNLIKE", "") else "one"
print(json.dumps({"device": kind}), flush=True)
for line in sys.stdin:
    row = measured(json.loads(line)["policy"])
    if "--compile" not in sys.argv: del row["failed"]
    print(json.dumps(row), flush=True)
"""

FINDER = """
import importlib.util
from kvjax.bench.worker import serve
serve(lambda: {"device": "one"}, lambda case: {"found": importlib.util.find_spec("only_there") is not None})
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tiny: Params) -> Case:
    """A case of the tiny model's shape."""
    monkeypatch.setitem(presets.PRESETS, "tiny", tiny.config)
    return Case("full", {}, context=50, batch=2, shape="tiny", new_tokens=70, dtype="float32")


def test_a_row(small: Case, tiny: Params) -> None:
    row = measure.measure(small, tiny, bandwidth=1e9, memory=None)
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny)) - tiny.embed.nbytes
    live = 2 * 2 * (50 + 70) * 2 * 2 * 16 * 4  # rows, layers, tokens, KV heads, k and v, head dim, bytes
    assert (row["weight_bytes_read"], row["cache_bytes_read"]) == (weights, live)
    assert row["floor_ms"] == pytest.approx((weights + live) / 1e6)
    assert row["times_floor"] == pytest.approx(row["tpot_ms"] / row["floor_ms"])
    assert row["cache_bytes"] == get_policy("full").nbytes(tiny.config, 2, 50, 70, "float32")
    assert row["peak_bytes"] == max(row["program_bytes"].values()) > weights + row["cache_bytes"]
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["tpot_ms"])
    assert len(row["tpot_all_ms"]) == 2
    assert row["compression_s"] > 0
    assert row["latency_s"] == pytest.approx(row["ttft_all_s"][-1] + row["decode_s"])
    json.dumps(row)


def test_filled_states_are_as_full_as_real_ones_and_what_a_step_reads_of_them(tiny: Params) -> None:
    """Of what is freed, live slots and not all there are; of what is sparse, the selection and its metadata."""
    specs = layer_specs(tiny.config, 2, 50, 8, tiny.dtype)
    tree, pair = kvjax.TreeKV(budget=20, sinks=2), 2 * 16 * 4
    state = states.filled(tree, specs, 50)
    assert state.pos.tolist() == [50, 50]
    assert shapes_of(state) == shapes_of(states.shapes(tree, specs))
    for spec, cache in zip(specs, state.caches, strict=True):
        assert tree.layer(spec).view(cache).count.tolist() == [[20, 20]] * 2
        assert tree.layer(spec).view(cache).seen.tolist() == [50, 50]
    assert (
        floor.cache_bytes_read(tree, specs, state.caches)
        == 2 * 2 * 2 * 20 * pair
        < tree.nbytes(tiny.config, 2, 50, 8, tiny.dtype)
    )
    quest, long = (
        get_policy("quest", budget=32, page=16, dense_layers=0),
        layer_specs(tiny.config, 1, 200, 8, tiny.dtype),
    )
    read = floor.cache_bytes_read(quest, long, states.filled(quest, long, 200).caches)
    assert read == quest.bytes_read(tiny.config, 1, 200, 8, tiny.dtype) < 2 * 2 * 200 * pair


def test_compression_is_timed_in_every_layer(tiny: Params) -> None:
    """The compiler does not see that all layers are given the same queries, keys and values."""
    policy, specs = get_policy("snapkv", budget=20, window=4), layer_specs(tiny.config, 1, 50, 8, tiny.dtype)
    one, two = (compression.compiled(policy, specs[:layers]).cost_analysis()["flops"] for layers in (1, 2))
    assert 1.9 < two / one < 2.1
    assert compression.seconds(policy, specs, 50) > 0


def shapes_of(tree: object) -> object:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_the_largest_batch_fits_and_the_next_step_would_not(small: Case, tiny: Params) -> None:
    case = dataclasses.replace(small, batch="largest", prefill=False, new_tokens=4)
    memory = 800_000
    row = measure.measure(case, tiny, bandwidth=None, memory=memory)
    assert row["peak_bytes"] <= memory
    assert [row[name] for name in ("ttft_s", "compression_s", "latency_s", "floor_ms")] == [None] * 4
    assert row["tpot_ms"] > 0
    assert list(row["program_bytes"]) == ["decode"]
    more = row["batch_run"] + max(row["batch_run"] // 16, 1) + 1
    assert max(measure.needed(case, case.engine(tiny.config, more)).values()) > memory
    with pytest.raises(ValueError, match="a single row needs"):
        measure.measure(case, tiny, bandwidth=None, memory=1000)
    with pytest.raises(ValueError, match="give one"):
        measure.measure(case, tiny, bandwidth=None, memory=None)


def test_a_case_that_needs_too_much_is_not_tried(small: Case, tiny: Params) -> None:
    with pytest.raises(ValueError, match="of the device's memory, which has 1000"):
        measure.measure(dataclasses.replace(small, prefill=False, new_tokens=4), tiny, bandwidth=None, memory=1000)


def test_failures_are_rows_and_the_next_case_runs(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    cases = [Case(name, {}, 10, 1, "tiny") for name in ("fine", "raises", "dies", "hangs", "other")]
    run_ = partial(run, workers={"kvjax": [sys.executable, "-c", WORKER]}, out=out)
    rows = run_(cases, case_seconds=6)
    assert [row["policy"] for row in rows] == [case.policy for case in cases]
    assert rows[1]["failed"] == "MemoryError: RESOURCE_EXHAUSTED"
    assert rows[2]["failed"].startswith("the process ended with code 3: ")
    assert rows[2]["failed"].endswith("last words")
    assert rows[3]["failed"] == "took longer than 6 s"
    assert rows[4]["tpot_ms"] == rows[0]["tpot_ms"] == 0.1
    assert json.loads(out.read_text())["rows"] == rows

    more = [*cases, Case("more", {"budget": 0.2}, 20, 1, "tiny")]
    again = run_(more)
    assert again[:5] == rows  # not run again
    assert again[5]["tpot_ms"] == 0.2
    assert run_(more) == again

    assert run_([*more, Case("late", {}, 30, 1, "tiny")], budget_seconds=0) == again
    found = json.loads(out.read_text())
    found["header"]["device"] = "another"
    out.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="other device"):
        run_([*more, Case("late", {}, 30, 1, "tiny")])


@pytest.fixture
def sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Command of a worker whose rows tell its device, and how many others lived when it measured."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "pids").mkdir()
    return [sys.executable, "-S", "-c", SHARING, str(tmp_path)]


@pytest.fixture
def on_two(sharing: list[str], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`run` with two devices."""
    workers = {"kvjax": sharing, "peer": sharing}
    return partial(run, workers=workers, out=tmp_path / "rows.json", devices=2, case_seconds=60)


def named(*names: str, program: str = "kvjax") -> list[Case]:
    """Cases that are told apart by their length."""
    return [Case(name, {}, 10 + i, 1, "tiny", program=program) for i, name in enumerate(names)]


def asked(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["program"], row["context"]) for row in rows]


def test_devices_share_cases(on_two: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    said = []
    cases = named("meets", "meets", *["fine"] * 6)
    rows = on_two(cases, said=said.append)
    assert asked(rows) == [(case.program, case.context) for case in cases]
    assert {row["on"] for row in rows[:2]} == {"0", "1"}
    assert len({(row["on"], row["pid"]) for row in rows}) == 2
    assert sorted(asked(said)) == asked(rows)
    found = json.loads((tmp_path / "rows.json").read_text())
    assert (found["rows"], found["header"]) == (rows, {"device": "one", "devices": 2})

    before, after = Case("fine", {}, 5, 1, "tiny"), Case("fine", {}, 30, 1, "tiny")
    more = on_two([before, *cases[1:], after])
    assert more[0] == rows[0]  # which is not asked for
    assert more[2:-1] == rows[1:]  # not measured again
    assert asked(more[1:2] + more[-1:]) == [("kvjax", 5), ("kvjax", 30)]


def test_other_programs_are_measured_afterwards_and_alone(on_two: Callable[..., list[dict[str, Any]]]) -> None:
    ours, peers, said = named("meets", "meets", "fine"), named("fine", "fine", program="peer"), []
    cases = [ours[0], *peers, *ours[1:]]
    rows = on_two(cases, said=said.append)
    assert asked(rows) == [(case.program, case.context) for case in cases]
    assert said[3:] == rows[1:3]
    assert [(row["on"], row["beside"]) for row in rows[1:3]] == [("0", 0)] * 2


def test_a_single_device_is_not_named(on_two: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    first, second = on_two(named("fine", "fine"), devices=1)
    assert (first["on"], first["pid"]) == (None, second["pid"])
    assert json.loads((tmp_path / "rows.json").read_text())["header"] == {"device": "one"}


def test_a_worker_that_dies_beside_another_costs_its_case(on_two: Callable[..., list[dict[str, Any]]]) -> None:
    rows = on_two(named("meets", "meets", *["dies", "fine"] * 3))
    assert ["failed" in row for row in rows] == [False, False, *[True, False] * 3]


def test_a_device_that_takes_no_worker_leaves_cases_to_others(
    on_two: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    rows = on_two(named("meets", "meets", "dies on 1", "dies on 1", "fine", "fine"), env={"kvjax": {"ONCE": "1"}})
    assert sum("failed" in row for row in rows[2:4]) == 1
    assert [row["on"] for row in rows[4:]] == ["0"] * 2

    for path in (*tmp_path.glob("begun-*"), tmp_path / "rows.json"):
        path.unlink()
    rows = on_two(named("dies", "dies", "fine", "fine"), env={"kvjax": {"ONCE": "0,1"}})
    assert ["code 3" in row["failed"] for row in rows] == [True, True, False, False]
    assert all(row["failed"].endswith("not again") for row in rows[2:])


def test_the_end_of_a_run_costs_no_case(on_two: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    """Whether the time is up or something goes wrong."""
    cases = named("meets", "meets", "waits", "waits", "fine")
    assert [row["policy"] for row in on_two(cases, budget_seconds=5)] == ["meets", "meets"]

    def interrupt(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_two([*named("waits"), Case("fine", {}, 30, 1, "tiny")], said=interrupt)
    assert [row["context"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [10, 11, 30]


def test_devices_are_alike_and_there_are_so_many(
    on_two: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="has other device"):
        on_two(named("waits", "waits"), env={"kvjax": {"UNLIKE": "1"}})
    with pytest.raises(ValueError, match="0 devices; give 1 or more"):
        on_two(named("fine"), devices=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,4")
    assert [row["on"] for row in on_two(named("fine"))] == ["5"]
    assert environments(2) == [{"CUDA_VISIBLE_DEVICES": name} for name in ("5", "3")]
    with pytest.raises(ValueError, match="4 devices, but CUDA_VISIBLE_DEVICES is '5,3,4'"):
        environments(4)


def test_compiling_ahead(sharing: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = [*sharing, "--compile"]
    decode.compile_ahead(named("meets", "meets"), command, jobs=2, devices=2)
    assert sorted(line.split(": ")[1] for line in capsys.readouterr().out.splitlines()) == ["0 false", "1 false"]
    plain, prompted, slow = named("full", "quest", "chelsea")
    decode.compile_ahead([dataclasses.replace(plain, prefill=False), prompted, slow], command, jobs=1)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["chelsea", "quest", "full"]


def test_compiling_ahead_has_an_end_and_goes_on_without_what_does_not_start(
    sharing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*sharing, "--compile"]
    decode.compile_ahead(named("waits", "fine"), command, jobs=1, seconds=1.5)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("compiled waits 10 x 1: took longer than")
    cases = [*named("fine"), *named("fine", program="refused")]
    decode.compile_ahead(cases, command, jobs=1, env={"refused": {"PYTHONHOME": "nowhere"}})
    fine, refused = capsys.readouterr().out.splitlines()
    assert fine == "compiled fine 10 x 1: None false"
    assert "code 1" in refused


def test_what_is_measured_over_several_devices() -> None:
    args = argparse.Namespace(shape=None, layers=None, scale=1, new_tokens=8)
    cases, env = several_devices.chosen(args)
    assert len(set(map(repr, cases))) == len(cases)
    assert {case.program for case in cases} == {"kvjax", *env}
    assert [case.bound_policy().info.name for case in cases[-2:]] == ["full", "full"]


def test_a_program_may_have_imports_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_there.py").touch()
    cases = [Case("full", {}, 10, 1, "tiny", program=program) for program in ("kvjax", "kvpress")]
    workers = {case.program: [sys.executable, "-c", FINDER] for case in cases}
    rows = run(cases, workers, tmp_path / "rows.json", env={"kvpress": decode.imports_first(tmp_path)})
    assert [row["found"] for row in rows] == [False, True]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["one", "two"]))
    assert decode.imports_first(tmp_path)["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "one", "two"]
    monkeypatch.delenv("PYTHONPATH")
    assert decode.imports_first(tmp_path)["PYTHONPATH"] == str(tmp_path)


def test_policies_as_they_are_written(small: Case) -> None:
    assert read_policy("full") == ("full", {})
    assert read_policy("treekv:0.2,sinks=2") == ("treekv", {"budget": 0.2, "sinks": 2})
    name, settings = read_policy("catekv:32,eta=0.7,share_adaptive=0.5,chunk=4")
    assert settings == {"budget": 32, "eta": 0.7, "share_adaptive": 0.5, "chunk": 4}
    policy = dataclasses.replace(small, policy=name, settings=settings).bound_policy()
    assert policy.heads == (((0,), (0,)), ((1,), (1,)))  # consistent, adaptive; [group][layer]
    with pytest.raises(ValueError, match="give a whole number"):
        read_policy("treekv:budget=0.2,sinks=few")


def test_policies_of_others_and_random_statistics(small: Case) -> None:
    name, settings = read_policy("recompress(snapkv:32;every=8)")
    policy = dataclasses.replace(small, policy=name, settings=settings).bound_policy()
    assert policy == kvjax.get_policy("recompress(snapkv:32;every=8)").bind(small.config)
    with pytest.raises(ValueError, match="Close it with"):
        read_policy("recompress(snapkv:32")
    name, settings = read_policy("triattention:32,every=8,window=4,profile=random")
    policy = dataclasses.replace(small, policy=name, settings=settings).bound_policy()
    assert policy.profile.layer(1, small.config.head_dim).shape == (
        small.config.num_heads,
        3,
        small.config.head_dim // 2,
    )


def test_figures(tmp_path: Path) -> None:
    base = dataclasses.asdict(Case("full", {}, 1, 1, "tiny"))
    rows = [
        base
        | {"context": context, "batch": batch, "batch_run": batch, "tpot_ms": context * batch, "floor_ms": 1.0}
        | {"peak_bytes": 2e9, "tokens_per_s": batch * 10}
        for context in (100, 200)
        for batch in (1, 4)
    ]
    rows.append(base | {"failed": "out of memory"})
    figure = figures.by_context(rows)
    line, dotted = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[100, 100], [200, 200]]
    assert (dotted.get_linestyle(), dotted.get_ydata().tolist()) == (":", [1, 1])
    assert figure.axes[2].lines[0].get_ydata().tolist() == [2, 2]
    assert "ms" in figure.axes[0].get_ylabel()
    assert figures.by_batch(rows).axes[1].lines[0].get_xydata().tolist() == [[1, 10], [4, 40]]
    with pytest.raises(ValueError, match="no row has a time"):
        figures.by_batch(rows[-1:])


def test_refused_before_anything_runs(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kvjax.cli import app

    def bench(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["bench", "-o", str(tmp_path / "rows.json"), *arguments])
        assert result.exit_code in (1, 2)
        return result.stderr

    assert "unknown policy 'nope'" in bench("--policies", "nope")
    assert "give whole numbers" in bench("--context", "1k")
    assert "llama-3.1-8b" in bench("--shape", "gpt-2")
    assert "'--devices'" in bench("--devices", "0")
    assert "'int9'; give any of float, int8, int4" in " ".join(bench("--weights", "float,int9").split())
    assert "--weights" in bench("--weights", "int8,int8")
    assert "mesh='wheels=2'; give a jax.sharding.Mesh" in " ".join(bench("--mesh", "wheels=2").split())
    assert "--devices: processes" in bench("--mesh", "model=2", "--devices", "2")
    assert not list(tmp_path.iterdir())


def test_peers_are_measured_once_and_in_floats() -> None:
    asked = "full", None, "llama-3.1-8b", "128", "1", 8, False, "bfloat16", 1, "float,int8"
    found = peers.cases(read_cases(*asked))
    assert {case.weights for case in found} == {"float"}
    assert len(found) == len(set(map(repr, found))) == 4


@pytest.mark.parametrize("policy", ["chelsea:32,every=8,sinks=2,recent=4", "treekv:32,sinks=2"])
def test_a_text_longer_than_the_cache(policy: str, small: Case, tiny: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held and what the program takes do not grow with the text, in a layer."""
    layer = init(tiny.config.with_depth(1), jax.random.key(0))
    monkeypatch.setitem(presets.PRESETS, "tiny", layer.config)
    name, settings = read_policy(policy)
    cases = [
        dataclasses.replace(small, policy=name, settings=settings, context=tokens, batch=1) for tokens in (70, 160)
    ]

    def measured(case: Case, block: int, seconds: float) -> dict[str, Any]:
        return long_context.measure(case, long_context.compiled(case, layer, block), seconds)

    rows = [measured(case, 16, float("inf")) for case in cases]
    assert [row["tokens_read"] for row in rows] == [64, 160]
    assert [row["marks"][-1]["tokens"] for row in rows] == [64, 160]
    for held in ("cache_bytes", "program_bytes"):
        assert rows[0][held] == rows[1][held]
    assert rows[0]["cache_bytes"] < rows[0]["full_cache_bytes"] < rows[1]["full_cache_bytes"]
    cut = measured(cases[1], 16, 0.0)
    assert (cut["tokens_read"], len(cut["marks"])) == (16, 1)
    if policy.startswith("treekv"):
        whole = measured(cases[0], 0, float("inf"))
        assert (whole["tokens_read"], whole["block"]) == (70, 0)
        assert len(whole["written"]) == long_context.NEW_TOKENS


def test_versions_are_compared_on_any_list_of_cases(tmp_path, monkeypatch):
    """All combinations of the options, or the lines of a file; the table names what cases differ in besides their sizes."""

    def asked(*options: str) -> list[dict[str, Any]]:
        found = []
        monkeypatch.setattr(beside, "cases", lambda args, cases=beside.cases: found.extend(cases(args)) or [])
        monkeypatch.setattr(sys, "argv", ["beside", str(tmp_path), "--out", str(tmp_path / "out.json"), *options])
        beside.main()
        monkeypatch.undo()
        return found

    (tmp_path / "kvjax" / "bench").mkdir(parents=True)
    grid = asked("--policies", "full,chelsea:0.2,sinks=4", "--context", "64,128", "--batch", "1,8")
    assert len(grid) == 8
    assert grid[0] == {
        "policy": "full", "context": 64, "batch": 1, "shape": "llama-3.1-8b", "new_tokens": 384, "prefill": True, "layers": None
    }  # fmt: skip
    assert {case["policy"] for case in grid} == {"full", "chelsea:0.2,sinks=4"}
    listed = [
        {"policy": "full", "context": 64, "batch": 1, "shape": "toy", "weights": kind} for kind in ("int8", "int4")
    ]
    (tmp_path / "cases").write_text("\n".join(map(json.dumps, listed)) + "\n\n")
    assert asked("--cases", str(tmp_path / "cases")) == listed
    rows = [
        {"version": version, **case, "tpot_ms": ms, "cache_bytes": 8}
        for case in listed
        for version, ms in (("older", 2.0), ("newer", 3.0))
    ]
    assert beside.table(rows[:3]).splitlines()[2:] == [
        "| `full` | 64 x 1, weights=int8 |  | 2 to 3 (+50.0 %) |  | 8, equal |  |  |"
    ]
