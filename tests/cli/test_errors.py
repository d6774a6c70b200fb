"""What goes wrong is told in one line, with an exit code that a script can tell apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import kvjax


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "treekvv"], "unknown policy 'treekvv'. Known policies: .*treekv.* Did you mean 'treekv'"),
        (["--policy", "treekv", "--set", "blok=3"], "no hyperparameter 'blok'. It takes budget, sinks"),
        (["--policy", "treekv", "--set", "block=x"], "treekv: block='x'; give a whole number$"),
        (["--policy", "treekv", "--set", "recent=x"], "recent='x'; give a whole number or none$"),
        (["--policy", "treekv", "--set", "keep=right"], "keep='right'; give score or left$"),
        (["--policy", "treekv", "--budget", "many"], "budget='many'; give a number$"),
        (["--policy", "treekv", "--budget", "3"], "budget of 3 gives 3 slots"),
        (["--temperature", "-1"], "temperature=-1.0; give 0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--model", "/no/such/model"], "/no/such/model: no such file or directory"),
    ],
)
def test_what_the_library_refuses(kvjax_command, checkpoint: Path, arguments: list[str], says: str) -> None:
    model = [] if "--model" in arguments else ["--model", checkpoint]
    for as_json in ([], ["--json"]):
        result = kvjax_command("generate", *model, *arguments, *as_json, "hello")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.count("\n") == 1
        message = json.loads(result.stderr)["error"] if as_json else result.stderr.removeprefix("error: ").rstrip()
        assert_says(message, says)


def assert_says(message: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(message)


def test_json_errors_name_their_kind(kvjax_command) -> None:
    result = kvjax_command("generate", "--policy", "nope", "--json", "hello")
    assert json.loads(result.stderr)["type"] == "PolicyError"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--nope"],
        ["generate", "--set", "block", "hello"],
        ["generate", "--prompt-file", "x", "hello"],
        ["generate", "--dtype", "int4", "hello"],
        ["convert", "only-one"],
        ["nope"],
    ],
)
def test_wrong_usage(kvjax_command, arguments: list[str]) -> None:
    result = kvjax_command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr


def test_prompt_files_that_cannot_be_read(kvjax_command, checkpoint: Path, tmp_path: Path) -> None:
    missing, binary = tmp_path / "missing", tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    assert kvjax_command("generate", "-f", missing).stderr == f"error: {missing}: No such file or directory\n"
    assert (
        kvjax_command("generate", "-f", binary).stderr
        == f"error: {binary}: not UTF-8 text (invalid start byte at byte 2)\n"
    )


def test_an_empty_prompt(kvjax_command, checkpoint: Path) -> None:
    result = kvjax_command("generate", "--model", checkpoint, stdin="")
    assert (result.exit_code, result.stderr) == (1, "error: the prompt is empty; give a text to continue\n")


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("as_json", [False, True])
def test_warnings_are_said_once(kvjax_command, checkpoint: Path, as_json: bool) -> None:
    options = ["--json"] if as_json else []
    result = kvjax_command("generate", "--model", checkpoint, "--max-new-tokens", 130, *options, "hello")
    assert result.exit_code == 0
    line = json.loads(result.stderr)["warning"] if as_json else result.stderr.removeprefix("warning: ")
    assert line.startswith("positions up to 132 are beyond the 128 this model was trained on")
    assert result.stderr.count("\n") == 1


def failing(error: BaseException) -> Callable[..., Any]:
    def stream(*arguments: Any, **options: Any) -> Any:
        raise error

    return stream


def imported_when_interrupted() -> ImportError:
    """What a compiled module makes of a Ctrl-C."""
    error = ImportError("initialization failed")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), imported_when_interrupted()], ids=["Ctrl-C", "import"])
def test_interruption_is_quiet(
    kvjax_command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(kvjax, "stream", failing(error))
    result = kvjax_command("generate", "--model", checkpoint, "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_device_out_of_memory_is_one_line(kvjax_command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvjax, "stream", failing(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")))
    result = kvjax_command("generate", "--model", checkpoint, "hello")
    assert (result.exit_code, result.stderr) == (1, "error: RESOURCE_EXHAUSTED: out of memory\n")


def test_mistakes_in_the_code_keep_their_traceback(
    kvjax_command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvjax, "stream", failing(TypeError("a bug")))
    assert isinstance(kvjax_command("generate", "--model", checkpoint, "hello").exception, TypeError)


def test_debug_lets_the_traceback_through(kvjax_command) -> None:
    result = kvjax_command("--debug", "generate", "--policy", "nope", "hello")
    assert isinstance(result.exception, kvjax.PolicyError)
