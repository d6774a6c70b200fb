"""Mistakes on the command line are told in a sentence before a model is loaded, whatever they are."""

import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HUGE = "1" + 40 * "0"
BAD = ["nan", "inf", "-1", "0", HUGE, "", "x", "1,1", "1,", ","]
"""What no number, and no list of numbers, may be."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files of all kinds that cannot be read as text, by name; and one that can."""
    found = {name: tmp_path / name for name in ("folder", "binary", "zeros", "empty", "blank", "missing", "text")}
    found |= {name: tmp_path / name for name in ("pipe", "device", "sparse", "nested")}
    os.mkfifo(found["pipe"])
    found["device"].symlink_to("/dev/zero")
    with found["sparse"].open("wb") as stream:
        stream.truncate(1 << 36)
    found["nested"].write_text("[" * 100_000)
    found["folder"].mkdir()
    found["binary"].write_bytes(bytes(range(256)))
    found["zeros"].write_bytes(bytes(100))
    found["empty"].write_bytes(b"")
    found["blank"].write_bytes(b" \n\n")
    found["text"].write_text("One fish. Two fish. Red fish. Blue fish. " * 10)
    found["data"] = tmp_path / "data.jsonl"
    found["data"].write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    return found


@pytest.fixture
def refused(kvjax_command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs a command that has to refuse its arguments before anything is loaded; gives what it says."""
    import kvjax.bench.runner
    import kvjax.conversion

    def loaded(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr(kvjax.conversion, "load", loaded)
    monkeypatch.setattr(kvjax.conversion, "describe", loaded)
    monkeypatch.setattr(kvjax.bench.runner, "run", loaded)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        before = set(tmp_path.rglob("*"))
        result = kvjax_command(*arguments)
        assert isinstance(result.exception, SystemExit), (result.exception, result.stderr)
        assert (result.exit_code in (1, 2), result.stdout) == (True, "")
        *usage, said = [line for line in result.stderr.split("\n") if line.strip(" ─│╭╮╰╯")]
        assert (result.exit_code == 2) == bool(usage), result.stderr
        assert not usage or usage[0].strip().startswith("Usage:")
        assert len(said) > 20
        assert set(tmp_path.rglob("*")) == before, "nothing is left behind"
        return said

    return run


BASES: dict[str, list[str]] = {
    "generate": ["hello"],
    "draw": ["hello"],
    "eval": ["needle-passkey"],
    "perplexity": ["--text", "text"],
    "fidelity": ["--text", "text"],
    "compare": ["--policies", "treekv", "--tasks", "needle-passkey", "--out", "results"],
    "recommend": ["--text", "text", "--ratio", "0.5", "--out", "results"],
    "calibrate": ["catekv", "--data", "text", "--out", "profile.json"],
    "bench": [],
    "inspect": ["nowhere"],
    "plan": ["--device", "t4"],
    "chat": [],
    "serve": [],
}


def command(name: str) -> list[str]:
    return [*(["eval", name] if name in ("perplexity", "fidelity") else [name]), *BASES[name]]


NUMBERS = [
    ("generate", "--max-new-tokens", []),
    ("generate", "--temperature", ["0"]),
    ("generate", "--top-k", []),
    ("generate", "--top-p", []),
    ("generate", "--min-p", ["0"]),
    ("generate", "--seed", ["0"]),
    ("generate", "--policy=treekv --budget", []),
    ("draw", "--max-new-tokens", []),
    ("draw", "--policies=treekv --budget", []),
    ("eval", "--length", []),
    ("eval", "--samples", []),
    ("eval", "--shots", ["0"]),
    ("eval", "--max-new-tokens", []),
    ("eval", "--batch", []),
    ("eval", "--depths", ["0"]),
    ("eval", "--policy=treekv --budget", []),
    ("perplexity", "--length", []),
    ("perplexity", "--window", []),
    ("perplexity", "--window=8 --stride", []),
    ("fidelity", "--length", []),
    ("compare", "--budgets", []),
    ("compare", "--length", []),
    ("compare", "--samples", []),
    ("compare", "--batch", []),
    ("recommend", "--ratio", []),
    ("recommend", "--length", []),
    ("recommend", "--samples", []),
    ("recommend", "--batch", []),
    ("calibrate", "--samples", []),
    ("calibrate", "--length", []),
    ("calibrate", "--set", []),
    ("bench", "--context", []),
    ("bench", "--batch", []),
    ("bench", "--new-tokens", []),
    ("bench", "--layers", []),
    ("bench", "--bandwidth", [HUGE]),
    ("bench", "--budget-seconds", [HUGE]),
    ("bench", "--case-seconds", [HUGE]),
    ("bench", "--devices", [HUGE]),
    ("bench", "--policies=treekv --budgets", []),
    ("inspect", "--memory", ["0", HUGE]),
    ("inspect", "--prompt-len", ["0"]),
    ("inspect", "--max-new-tokens", ["0"]),
    ("plan", "--context", []),
    ("plan", "--max-new-tokens", []),
    ("plan", "--batch", []),
    ("plan", "--count", []),
    ("plan", "--prefill-block", []),
    ("plan", "--memory", ["0", HUGE]),
    ("plan", "--policy=treekv --budget", []),
    ("chat", "--room", []),
    ("chat", "--max-new-tokens", []),
    ("chat", "--temperature", ["0"]),
    ("chat", "--top-p", []),
    ("chat", "--seed", ["0"]),
    ("chat", "--policy=treekv --budget", []),
    ("serve", "--rows", []),
    ("serve", "--max-total-tokens", []),
    ("serve", "--max-new-tokens", []),
    ("serve", "--prefill-block", []),
    ("serve", "--policy=treekv --budget", []),
]


@pytest.mark.parametrize(("name", "option", "fine"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_numbers(refused, files: dict[str, Path], name: str, option: str, fine: list[str]) -> None:
    for value in BAD:
        if value not in fine:
            *before, last = option.split(" ")
            refused(*command(name), *before, f"{last}={value}")


LISTS = [
    ("draw", "--policies"),
    ("eval", "--policies"),
    ("compare", "--policies"),
    ("compare", "--tasks"),
    ("recommend", "--policies"),
    ("bench", "--policies"),
    ("bench", "--shape"),
]
ONE = {"--policies": "treekv", "--tasks": "vt", "--shape": "llama-3.1-8b"}


@pytest.mark.parametrize(("name", "option"), LISTS)
def test_lists_of_names(refused, files: dict[str, Path], name: str, option: str) -> None:
    one = ONE[option]
    for value in ("", ",", f"{one},", f",{one}", f"{one},,{one}", "nope"):
        assert value.strip(",") in (says := refused(*command(name), f"{option}={value}")) or "empty" in says
    for again in (one, one.upper()):
        if option != "--shape" or again == one:
            assert "there twice" in refused(*command(name), f"{option}={one},{again}")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["generate", "--policy", "treekw", "x"], "treekv"),
        (["generate", "--policy", "treekv", "--set", "blok=4", "x"], "block"),
        (["draw", "--policies", "treekv", "--set", "blok=4", "x"], "block"),
        (["eval", "needle-paskey"], "needle-passkey"),
        (["eval", "perplexty"], "perplexity"),
        (["eval", "niah-single"], "niah_single_1"),
        (["eval", "LongBench-qaspr"], "longbench-qasper"),
        (["compare", "--policies", "full", "--tasks", "vtt", "--out", "x"], "vt"),
        (["calibrate", "catekv", "--data", "text", "--set", "ratoi=1", "--out", "x"], "ratio"),
        (["bench", "--shape", "lama-3.1-8b"], "llama-3.1-8b"),
        (["eval", "vt", "--polcies", "full"], "--policies"),
        (["generate", "--max-new-token", "3", "x"], "--max-new-tokens"),
    ],
)
def test_what_was_meant(refused, files: dict[str, Path], arguments: list[str], meant: str) -> None:
    said = refused(*arguments)
    assert meant in said.replace("there are", "\0").split("\0")[-1]
    assert "id you mean" in said or "Possible options" in said


def test_which_command_was_meant(kvjax_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    result = kvjax_command("evl", "vt")
    assert result.exit_code == 2
    assert "Did you mean 'eval'" in result.stderr


READERS = [
    ["generate", "--prompt-file", "FILE"],
    ["draw", "--prompt-file", "FILE"],
    ["eval", "perplexity", "--text", "FILE"],
    ["eval", "fidelity", "--text", "FILE"],
    ["eval", "needle-number", "--text", "FILE"],
    ["eval", "niah_single_2", "--text", "FILE"],
    ["eval", "gsm8k", "--data", "FILE", "--examples", "data.jsonl", "--shots", "1"],
    ["eval", "gsm8k", "--data", "data.jsonl", "--examples", "FILE", "--shots", "1"],
    ["eval", "math500", "--data", "FILE"],
    ["eval", "multi-query", "--data", "FILE"],
    ["eval", "longbench-qasper", "--data", "FILE"],
    ["eval", "qa_1", "--data", "FILE"],
    ["eval", "vt", "--policy", "catekv", "--set", "profile=FILE"],
    ["generate", "--policy", "infinigen", "--set", "profile=FILE", "x"],
    ["eval", "vt", "--policy", "kvzap", "--set", "weights=FILE"],
    ["eval", "vt", "--policy", "fast_kvzip", "--set", "weights=FILE"],
    ["eval", "vt", "--policy", "by_layer(fast_kvzip:weights=FILE; full)"],
    ["compare", "--policies", "full", "--tasks", "vt,perplexity", "--out", "results", "--text", "FILE"],
    ["recommend", "--ratio", "0.5", "--out", "results", "--text", "FILE"],
    ["recommend", "--ratio", "0.5", "--out", "results", "--task", "multi-query", "--data", "FILE"],
    ["calibrate", "catekv", "--out", "profile.json", "--data", "data.jsonl", "--data", "FILE"],
]
"""Commands that read a file."""


@pytest.mark.parametrize("kind", ["folder", "binary", "zeros", "empty", "blank", "missing", "pipe", "device", "sparse"])
@pytest.mark.parametrize("arguments", READERS, ids=lambda words: "-".join(words[:2]))
def test_files_that_are_no_text(refused, files: dict[str, Path], arguments: list[str], kind: str) -> None:
    said = refused(*(word.replace("FILE", kind) for word in arguments))
    assert kind in said or f"{kind}/qasper.jsonl" in said
    if kind in ("pipe", "device"):
        assert "a regular file was expected, not a pipe, socket or device" in said
    if kind == "sparse":
        assert "68719476736 bytes" in said


@pytest.mark.parametrize("policy", ["duoattention", "infinigen", "triattention"])
def test_profiles_that_cannot_be_read(refused, files: dict[str, Path], policy: str) -> None:
    def said(file: str) -> str:
        return refused("generate", "--policy", policy, "--set", f"profile={file}", "x")

    assert "not JSON that can be read" in said("nested")
    assert "binary: not UTF-8 text" in said("binary")
    files["text"].write_text("9" * 5000)
    assert "not JSON that can be read" in said("text")


def test_packed_numbers_of_a_profile_that_would_fill_the_memory(refused, files: dict[str, Path]) -> None:
    from kvjax.policies.profile import pack

    about = {"version": 3, "method": "infinigen", "model": "x", "data": "y", "settings": {}}
    layers = [pack(bytes(1 << 24))] * 17
    files["text"].write_text(json.dumps({**about, "matrices": layers}))
    assert "truncated, or too long" in refused("generate", "--policy", "infinigen:profile=text", "x")


NESTED = [
    "critical(" * 2000 + "full" + ")" * 2000,
    "by_layer(" * 2000,
    "catekv:adaptive=" + "(" * 2000 + "quest" + ")" * 2000,
    "by_head(a=full;profile=" + "(" * 2000 + ")" * 2000 + ")",
]


@pytest.mark.parametrize("policy", NESTED, ids=["wrapped", "open", "setting", "profile"])
def test_policies_nested_too_deep(refused, files: dict[str, Path], policy: str) -> None:
    for arguments in (
        ["generate", "x", "--policy", policy],
        ["eval", "vt", "--policies", f"full,{policy}"],
        ["bench", "--policies", policy],
        ["plan", "--device", "t4", "--policy", policy],
    ):
        said = refused(*arguments)
        assert "brackets are nested more than 32 deep. Nest fewer policies" in said
        assert len(said) < 400
    assert "a bracket is open. Close it with )" in refused("generate", "x", "--policy", "by_head(a=full;profile=(a)")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["draw", "x"], "--out"),
        (["eval", "needle-number"], "--out"),
        (["eval", "needle-number", "--policies", "full,kivi"], "--out"),
        (["eval", "needle-number", "--out", "rows.jsonl"], "--plot"),
        (["compare", "--policies", "full", "--tasks", "vt"], "--out"),
        (["compare", "--policies", "full", "--tasks", "vt", "--out", "results"], "--plot"),
        (["recommend", "--text", "text", "--ratio", "0.5"], "--out"),
        (["recommend", "--text", "text", "--ratio", "0.5", "--out", "results"], "--plot"),
        (["calibrate", "catekv", "--data", "text"], "--out"),
        (["calibrate", "catekv", "--data", "text", "--out", "profile.json"], "--plot"),
        (["bench"], "--out"),
        (["bench"], "--plot"),
    ],
)
def test_places_that_cannot_be_written(refused, files: dict[str, Path], arguments: list[str], option: str) -> None:
    name = arguments[0]
    folders = (
        (name in ("compare", "recommend") and option == "--out")
        or (name == "bench" and option == "--plot")
        or "full,kivi" in arguments
    )
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind("socket")  # stands for all that is there and is neither file nor folder
        for place in ("text" if folders else "folder", "text/below", "socket"):
            assert place.split("/")[0] in refused(*arguments, option, place)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["draw", "x"], "--out"),
        (["eval", "needle-number", "--out", "rows.jsonl"], "--plot"),
        (["compare", "--policies", "full", "--tasks", "vt", "--out", "results"], "--plot"),
        (["recommend", "--text", "text", "--ratio", "0.5", "--out", "results"], "--plot"),
        (["calibrate", "catekv", "--data", "text", "--out", "profile.json"], "--plot"),
    ],
)
def test_pictures(
    refused, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str], option: str
) -> None:
    assert "'.xyz'" in refused(*arguments, option, "picture.xyz").replace("'xyz'", "'.xyz'")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'matplotlib" in refused(*arguments, option, "picture.png")


def test_pictures_of_a_benchmark(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'matplotlib" in refused("bench", "--plot", "pictures")


@pytest.mark.parametrize(
    ("task", "module"), [("niah_single_1", "wonderwords"), ("cwe", "wonderwords"), ("longbench-gov_report", "rouge")]
)
def test_packages_that_a_task_needs(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, module: str
) -> None:
    from kvjax.evals.longbench import metrics
    from kvjax.evals.ruler import vocabulary

    for cached in (vocabulary.category, vocabulary.all_words, metrics._rouge):
        cached.cache_clear()
    file = tmp_path / "rows.jsonl"
    file.write_text('{"context": "a", "input": "b", "answers": ["c"], "all_classes": null, "length": 1}\n')
    monkeypatch.setitem(sys.modules, module, None)
    for arguments in (["eval", task], ["compare", "--policies", "full", "--out", "results", "--tasks", f"vt,{task}"]):
        assert "pip install 'jieba" in refused(*arguments, "--data", file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--stop", "", "x"], "strings that are not empty"),
        (["generate", "--policy", "treekv", "--budget", "3", "x"], "budget of 3 gives 3 slots"),
        (["generate", ""], "the prompt is empty; give a text to continue"),
        (["draw", ""], "the prompt is empty"),
        (["generate", "-n", "2147483647", "x"], "max_new_tokens=2147483647; give a whole number from 1 to 1073741824"),
        (["draw", "-n", "2147483647", "x"], "max_new_tokens=2147483647; give a whole number from 1"),
        (
            ["generate", "--policy", "treekv", "--budget", "2147483647", "x"],
            "budget=2147483647 is not valid. Give a positive whole",
        ),
        (["generate", "--policy", "kvzap", "x"], "kvzap: no weights are given"),
        (["generate", "--policy", "kvzap", "--budget", "64", "x"], "kvzap: no weights are given"),
        (["eval", "vt", "--policies", "full,fast_kvzip:0.5"], "fast_kvzip: no weights are given"),
        (["compare", "--policies", "kvzap", "--tasks", "vt", "--out", "x"], "kvzap: no weights are given"),
        (
            ["recommend", "--policies", "kvzap", "--text", "text", "--ratio", "0.5", "--out", "x"],
            "no weights are given",
        ),
        (["generate", "--policy", "by_layer(full; kvzap)", "x"], "kvzap: no weights are given"),
        (["generate", "--policy", "offloaded(kivi)", "x"], "cannot be offloaded"),
        (["eval", "vt", "--policy", "offloaded(adakv)"], "the store of 'adakv' cannot be offloaded"),
        (["plan", "--device", "t4", "--policy", "offloaded(kivi)"], "cannot be offloaded"),
        (["generate", "--policy", "quantized(h2o)", "x"], "'h2o' changes its cache while decoding"),
        (["generate", "--policy", "critical(full)", "x"], "'full' does not keep each head's highest scores"),
        (
            ["draw", "--policies", "prompt_only(turboquant),offloaded(turboquant)", "x"],
            "cannot be offloaded",
        ),
        (["generate", "--policy", "lagkv", "--prefill-block", "64", "x"], "lagkv: chunked prefill is not supported"),
        (
            ["eval", "vt", "--policies", "full,kvzip", "--prefill-block", "64"],
            "kvzip: chunked prefill is not supported",
        ),
        (
            ["plan", "--device", "t4", "--policy", "lagkv", "--prefill-block", "64"],
            "lagkv: chunked prefill is not",
        ),
        (
            ["generate", "--policy", "offloaded(full)", "--mesh", "data=1", "x"],
            "caches in host memory are not supported over a mesh",
        ),
        (
            ["eval", "vt", "--policy", "offloaded(full)", "--mesh", "data=1"],
            "caches in host memory are not supported over a mesh",
        ),
        (["eval", "perplexity"], "no text to read; give it as --text FILE"),
        (["eval", "fidelity", "--text", "text", "--length", "32"], "length=32; fidelity compares the last 32"),
        (["eval", "perplexity", "--text", "text", "--length", "1"], "give 2 or more"),
        (
            ["eval", "perplexity", "--text", "text", "--window", "8", "--policy", "treekv"],
            "windows are read with the full",
        ),
        (["eval", "perplexity", "--text", "text", "--window", "8", "--stride", "9"], "a stride of up to the window"),
        (["eval", "perplexity", "--text", "text", "--stride", "9"], "without a window"),
        (["eval", "perplexity", "--text", "text", "--length", "50,60"], "only needle tasks take several"),
        (["eval", "niah_single_2"], "hides its needles in a text"),
        (["eval", "vt", "--policy", "treekv", "--budget", "3"], "budget of 3 gives 3 slots"),
        (["eval", "vt", "--length", "40", "--policy", "treekv", "--budget", "0.1"], "budget of 0.1 gives 4 slots"),
        (["eval", "vt", "--plot", "map.png"], "give a needle task"),
        (["eval", "needle-number", "--plot", "map.png", "--policies", "full,kivi", "--out", "x"], "one policy"),
        (["eval", "gsm8k", "--data", "data.jsonl"], "no file of solved examples; give it as --examples FILE"),
        (["eval", "gsm8k", "--data", "data.jsonl", "--examples", "data.jsonl"], "shots=8; data.jsonl has 1 solved"),
        (["eval", "aime"], "no file of problems; give it as --data FILE"),
        (["eval", "multi-query", "--data", "data.jsonl", "--history", "all"], "history='all'"),
        (["eval", "longbench-qasper"], "give it as --data FILE"),
        (["compare", "--policies", "full", "--tasks", "vt,gsm8k", "--out", "x"], "no file of problems"),
        (["compare", "--policies", "full", "--tasks", "vt", "--out", "x", "--budgets", "1.5"], "above 0, up to 1"),
        (["recommend", "--text", "text", "--out", "x"], "give the limit as either --ratio or --memory"),
        (
            ["recommend", "--text", "text", "--out", "x", "--ratio", "0.5", "--memory", "1MB"],
            "either --ratio or --memory",
        ),
        (["recommend", "--text", "text", "--out", "x", "--memory", "0"], "memory of 0 bytes"),
        (["recommend", "--text", "text", "--out", "x", "--ratio", "0.5", "--query-aware"], "a text has no questions"),
        (["recommend", "--out", "x", "--ratio", "0.5"], "no text to measure, and no --task; give it as --text FILE"),
        (["recommend", "--out", "x", "--ratio", "0.5", "--text", "text", "--task", "fidelity"], "has no examples"),
        (["bench", "--policies", "treekv:nan"], "give a number"),
    ],
)
def test_what_does_not_go_together(refused, files: dict[str, Path], arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


def test_every_command_is_tried(kvjax_command) -> None:
    import typer.main

    from kvjax.cli import app

    tried = {name for name, *_ in NUMBERS} | {"policies", "convert"}
    assert set(typer.main.get_command(app).commands) <= tried


def test_names_in_any_case(kvjax_command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvjax.cli.hyperparameters import read_policies
    from kvjax.evals.tasks import task_name

    assert [policy.info.name for policy in read_policies("TreeKV, STREAMING-LLM,h2o", "8,0.5", (), "--policies")] == [
        *("treekv",) * 2,
        *("streaming_llm",) * 2,
        *("h2o",) * 2,
    ]
    assert [task_name(name) for name in ("Needle_Passkey", "NIAH-single-1", "LongBench-QASPER")] == [
        "needle-passkey",
        "niah_single_1",
        "longbench-qasper",
    ]


def test_standard_input_that_is_no_text(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kvjax.cli import app

    result = CliRunner().invoke(app, ["generate"], input=b"ab\xff")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: standard input: not utf-8 text (invalid start byte at byte 2)\n",
    )


def test_budgets_and_policies_of_a_sweep() -> None:
    from kvjax.cli.bench import _read_policies
    from kvjax.cli.hyperparameters import read_policies

    chosen = read_policies("full,kivi,snapkv", "0.25,64", ["bits=4", "window=8"], "--policies")
    assert [(policy.info.name, getattr(policy, "budget", None)) for policy in chosen] == [
        ("full", None),
        ("kivi", None),
        ("snapkv", 0.25),
        ("snapkv", 64),
    ]
    assert (chosen[1].bits, chosen[2].window) == (4, 8)
    cases = _read_policies("FULL,kivi:bits=4,SnapKV:window=8,treekv:0.2", "0.25,64")
    assert cases == [
        ("full", {}),
        ("kivi", {"bits": 4}),
        ("snapkv", {"budget": 0.25, "window": 8}),
        ("snapkv", {"budget": 64, "window": 8}),
        ("treekv", {"budget": 0.2}),
    ]
    assert list(itertools.chain(_read_policies("full,treekv", None))) == [("full", {}), ("treekv", {})]
