"""With `--json`, standard output is one document that a strict parser takes, or nothing; messages are JSON on standard error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import HF_CONFIG, weights, write_hf

import kvjax
from kvjax._util import strict_json
from kvjax.cli import progress
from kvjax.conversion import from_hf


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text.encode("utf-8")
    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which one weight is NaN, and with it every log-probability."""
    path = tmp_path_factory.mktemp("broken") / "small"
    tensors = weights(from_hf(HF_CONFIG))
    tensors["model.norm.weight"][0] = np.nan
    write_hf(path, tensors=tensors, tokenizer=True)
    return path


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("One fish. Two fish. Red fish. Blue fish. " * 4)
    return file


NOT_FINITE = pytest.mark.filterwarnings("ignore:.* weights are NaN or infinite:UserWarning")


@NOT_FINITE
def test_log_probabilities_that_are_none(kvjax_command, broken: Path) -> None:
    result = kvjax_command("generate", "--model", broken, "-n", 3, "--ignore-eos", "--json", "hello")
    assert result.exit_code == 0
    assert strictly(result.stdout)["logprobs"] == [None] * 3


@NOT_FINITE
def test_scores_that_are_none(kvjax_command, broken: Path, book: Path, tmp_path: Path) -> None:
    arguments = ("--model", broken, "--text", book, "--length", 20, "--out", tmp_path / "rows.jsonl", "--json")
    for _ in range(2):  # the second reads the file
        result = kvjax_command("eval", "perplexity", *arguments)
        assert result.exit_code == 0, result.stderr
        found = strictly(result.stdout)
        assert (found["value"], found["details"]) == (None, {"nll": None})


def test_what_else_is_printed_goes_elsewhere(kvjax_command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress and warnings as objects, and what a library prints as it is."""
    real = kvjax.generate

    def chatty(*arguments: Any, **options: Any) -> Any:
        print("a library's words")
        import time
        import warnings

        warnings.warn("odd: \x1b[1m\ud800 \u2028 ü", stacklevel=1)
        time.sleep(0.1)
        return real(*arguments, **options)

    monkeypatch.setattr(kvjax, "generate", chatty)
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [("default", None, Warning, None, 0)])
        result = kvjax_command("generate", "--model", checkpoint, "-n", 2, "--json", "hello")
    assert result.exit_code == 0, result.stderr
    assert strictly(result.stdout)["tokens"]
    said = result.stderr.split("\n")[:-1]
    said.remove("a library's words")
    kinds = {next(iter(strictly(line))) for line in said}
    assert kinds == {"warning", "progress"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["policies", "--nope"],
        ["policies", "extra"],
        ["inspect", "--memory", "lots"],
        ["inspect", "--prompt-len", "-1"],
        ["inspect", "\udcff\x1b[1m/nowhere"],
        ["plan"],
        ["plan", "--device", "h300"],
        ["plan", "--device", "t4", "--count", "0"],
        ["plan", "--device", "t4", "--weights", "int3"],
        ["generate", "--policy", "nope", "hello"],
        ["generate", "--dtype", "int4", "hello"],
        ["generate", "--set", "x", "hello"],
        ["generate", "--model", "/no/such\ud800", "hello"],
        ["eval"],
        ["eval", "nope"],
        ["eval", "vt", "--length", "many"],
        ["eval", "perplexity", "--text", "\udcff"],
        ["compare", "--policies", "full"],
        ["compare", "--policies", "full", "--tasks", "vt", "--out", "x", "--budgets", "nan"],
    ],
)
def test_a_refusal_is_an_object_on_standard_error(kvjax_command, arguments: list[str]) -> None:
    for at in (len(arguments), 1):
        result = kvjax_command(*arguments[:at], "--json", *arguments[at:])
        assert result.exit_code in (1, 2)
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert set(strictly(result.stderr)) == {"error", "type"}


@pytest.mark.parametrize(
    "arguments",
    [["policies"], ["inspect", "CHECKPOINT", "--memory", "1MB"], ["plan", "--model", "CHECKPOINT", "--device", "t4"]],
)
def test_what_needs_no_model_is_strict_too(kvjax_command, checkpoint: Path, arguments: list[str]) -> None:
    result = kvjax_command(*[str(checkpoint) if word == "CHECKPOINT" else word for word in arguments], "--json")
    assert result.exit_code == 0
    assert strictly(result.stdout)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "null"),
        ([float("inf"), -float("inf"), np.float32("nan"), np.float64("inf"), 1.5], "[null, null, null, null, 1.5]"),
        (np.asarray([1, 2], np.int32), "[1, 2]"),
        ({"a": (1, {2: np.asarray([[np.nan]])})}, '{"a": [1, {"2": [[null]]}]}'),
        ("\ud83d\ude00 \ud800", '"😀 \ufffd"'),
        ({"\udcff": Path("x")}, '{"\ufffd": "x"}'),
        ({(1, 2): None, None: True}, '{"(1, 2)": null, "null": true}'),
    ],
)
def test_values_that_json_has_no_form_for(value: Any, text: str) -> None:
    assert strict_json.dumps(value) == text
    assert strictly(strict_json.dumps(value)) == strict_json.loads(text.encode())


def test_a_terminal_of_another_encoding(kvjax_command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import io
    import sys

    from kvjax.cli import console

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    console.print_json({"a": "語 ü"})
    assert json.loads(raw.getvalue().decode("ascii")) == {"a": "語 ü"}
