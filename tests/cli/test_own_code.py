"""Policies and tasks of the user's own on the command line: `--policies-from`, and tasks as `FILE.py:NAME`."""

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import pytest

from kvjax._util import user_code
from kvjax.policies import registry

POLICY = """
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import kvjax
from kvjax.policies import PolicyInfo, PromptScorer

print("imported")


@kvjax.register
@dataclasses.dataclass(frozen=True)
class Own(PromptScorer):
    about: ClassVar[PolicyInfo] = PolicyInfo(name="{name}", summary="small keys", memory="freed")

    budget: int | float = 16

    def scores(self, spec, prompt):
        return -jnp.linalg.norm(prompt.k, axis=-1).swapaxes(1, 2)
"""

TASK = """
import dataclasses

from kvjax.evals import Example

NUMBER = 3


@dataclasses.dataclass(frozen=True)
class Letters:
    name: str = "letters"

    def examples(self, form):
        return [Example("abc " * 20, f"{letter} ", (letter,), max_new_tokens=2, chat=False) for letter in "abc"]

    def score(self, answer, example):
        return float(bool(answer))


@dataclasses.dataclass(frozen=True)
class Needy:
    needed: int


READY = Letters()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file of Python; what it registers and imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv(user_code.POLICIES, "")
    before = set(sys.modules)

    def written(name: str, content: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(content))
        return file

    yield written
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def names(result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [entry["name"] for entry in json.loads(result.stdout)]


@pytest.mark.parametrize("form", ["file", "path", "module", "package"])
def test_a_module_of_policies(kvjax_command, write, form):
    file = write({"package": "own_package/inside.py"}.get(form, "own_policy.py"), POLICY.format(name="own_one"))
    source = {"file": file.name, "path": str(file), "module": "own_policy", "package": "own_package.inside"}[form]
    for _ in range(2):  # the second time it is loaded already
        assert "own_one" in names(kvjax_command("policies", "--json", "--policies-from", source))
    assert user_code.os.environ[user_code.POLICIES] == ""


def test_the_environment_names_it(kvjax_command, write, monkeypatch):
    monkeypatch.setenv(user_code.POLICIES, str(write("own_policy.py", POLICY.format(name="own_two"))))
    assert "own_two" in names(kvjax_command("policies", "--json"))


def test_commands_use_own_policies(kvjax_command, write, checkpoint, tmp_path):
    write("own_policy.py", POLICY.format(name="own_three"))
    own, model = ("--policies-from", "own_policy.py"), ("--model", checkpoint)
    result = kvjax_command("generate", "hello " * 9, *model, "--policy", "own_three:16", "-n", 4, "--json", *own)
    assert json.loads(result.stdout)["policy"] == {"name": "own_three", "budget": 16}
    for arguments in (
        ("draw", "hello " * 9, *model, "--policies", "own_three", "-n", 2, "--out", tmp_path / "kept.svg"),
        ("inspect", checkpoint, "--json"),
        ("plan", "--device", "t4", "--model", "llama-3.1-8b", "--policy", "own_three:0.2", "--context", 1000),
    ):
        result = kvjax_command(*arguments, *own)
        assert result.exit_code == 0, result.stderr


@pytest.mark.slow
def test_benchmarks_measure_own_policies(kvjax_command, write, tmp_path):
    write("own_policy.py", POLICY.format(name="own_four"))
    arguments = ("--policies", "own_four:16", "--context", 64, "--new-tokens", 8, "--layers", 1, "--dtype", "float32")
    result = kvjax_command("bench", *arguments, "--out", tmp_path / "bench.json", "--policies-from", "own_policy.py")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (row["policy"], row.get("failed")) == ("own_four", None)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nowhere.py", None, "nowhere.py: no such file; give a Python file"),
        ("nowhere", None, "nowhere: no such module; give a Python file"),
        ("nowhere.inside", None, "nowhere.inside: no such module"),
        ("empty.py", "x = 1", "empty.py: it registers no policy; put @kvjax.register above a policy class"),
        ("needs.py", "import nothing_like_this", "needs.py: line 1 of needs.py: ModuleNotFoundError: No module named"),
        ("fails.py", "\n\nraise RuntimeError('oh')", "fails.py: line 3 of fails.py: RuntimeError: oh"),
        ("leaves.py", "raise SystemExit(3)", "leaves.py: line 1 of leaves.py: SystemExit: 3"),
        ("broken.py", "def f(:", "broken.py: SyntaxError: invalid syntax (broken.py, line 1)"),
        ("taken.py", POLICY.format(name="treekv"), "about.name = 'treekv' is empty or taken"),
        ("json.py", POLICY.format(name="own_json"), "json.py: Python has another module named json already"),
    ],
)
def test_modules_that_are_refused(kvjax_command, write, name, content, says):
    if content is not None:
        write(name, content)
    result = kvjax_command("policies", "--policies-from", name)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert says in result.stderr


@pytest.mark.filterwarnings("ignore:.* of the full cache's bytes")
def test_tasks_of_ones_own(kvjax_command, write, checkpoint, tmp_path):
    write("own_task.py", TASK)
    write("own_policy.py", POLICY.format(name="own_five"))
    model = ("--model", checkpoint, "--policies-from", "own_policy.py", "--json")
    result = kvjax_command("eval", "own_task.py:Letters", "--policy", "own_five:16", *model)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["task"], found["policy"], found["count"]) == ("letters", "own_five", 3)
    asked = ("compare", "--tasks", "own_task:READY", "--policies", "own_five", "--budgets", "0.6", "--out", "results")
    result = kvjax_command(*asked, *model)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["task"], row["policy"], row["count"]) for row in rows] == [
        ("letters", "full", 3),
        ("letters", "own_five", 3),
    ]
    assert sorted(file.name for file in (tmp_path / "results").glob("*.jsonl")) == [
        "letters-full.jsonl",
        "letters-own_five-0.6.jsonl",
    ]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("own_task.py:Leters", "own_task.py has no 'Leters'; give a task that it defines. Did you mean 'Letters'?"),
        ("own_task.py:NUMBER", "own_task.py:NUMBER: not a task; give a dataclass with a name"),
        ("own_task.py:Needy", "missing 1 required positional argument: 'needed'; give the task's fields defaults"),
        ("nowhere.py:Letters", "nowhere.py: no such file"),
    ],
)
def test_tasks_that_are_refused(kvjax_command, write, task, says):
    write("own_task.py", TASK)
    for arguments in (("eval", task), ("compare", "--policies", "full", "--tasks", task, "--out", "results")):
        result = kvjax_command(*arguments)
        assert result.exit_code == 1
        assert says in result.stderr


@pytest.mark.filterwarnings("default:positions up to", "ignore:.* of the full cache's bytes")
def test_a_comparison_has_the_options_of_an_evaluation(kvjax_command, checkpoint, tmp_path):
    """All but the windows of a perplexity, which no policy but the full cache has."""
    from kvjax.cli.task_options import EvaluationOptions

    shared = {field.name for field in dataclasses.fields(EvaluationOptions)}
    assert {"depths", "weights", "embedding", "prefill_block", "settings", "history", "score_by"} <= shared
    asked = ("compare", "--model", checkpoint, "--tasks", "needle-number", "--policies", "snapkv", "--budgets", "0.6")
    asked += ("--set", "window=4", "--length", 100 * 3, "--depths", "0,1", "--samples", 2, "--prefill-block", 64)
    result = kvjax_command(*asked, "--weights", "int8", "--no-chat", "--batch", 2, "--out", tmp_path / "results")
    assert result.exit_code == 0, result.stderr
    columns = ["Task", "Policy", "Target", "Budget", "Measure", "Value", "n", "Cache", "Of", "full", "Tokens/s"]
    header, *rows = result.stdout.splitlines()
    assert header.split() == columns
    assert [" ± " in row for row in rows] == [True, True]
    (table,) = [json.loads(file.read_text()) for file in (tmp_path / "results").glob("*.json")]
    assert [(row["count"], row["settings"].get("window")) for row in table["rows"]] == [(4, None), (4, 4)]
    settings = json.loads((tmp_path / "results" / "needle-number-full.jsonl").read_text().splitlines()[0])["header"]
    assert (settings["settings"]["prefill_block"], settings["settings"]["task"]["depths"]) == (64, [0, 1])
