"""What is missing is named as it can be installed: by the packages' own names, since kvjax may have come from anywhere."""

import importlib.metadata
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvjax
from kvjax._util import extras

ROOT = Path(kvjax.__file__).parents[1]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The project's own description, in place of what was installed, which may be another version."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(described["dependencies"])
    for extra, requirements in described["optional-dependencies"].items():
        lines += [f'{requirement}; extra == "{extra}"' for requirement in requirements]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    return described


@pytest.mark.parametrize("extra", ["cuda", "eval", "lm-eval", "plot", "tpu", "tunix"])
def test_commands_name_the_packages_of_the_extra(project: dict, extra: str) -> None:
    command = extras.install(extra)
    words = shlex.split(command.removeprefix("pip install "))
    assert [Requirement(word) for word in words] == list(map(Requirement, project["optional-dependencies"][extra]))


def test_a_missing_package(project: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge", None)
    says = r"^LongBench's ROUGE-L needs rouge: pip install 'jieba>=[\d.]+' 'math-verify>=[\d.]+' 'rouge>=[\d.]+' 'wonderwords>=[\d.]+' \("
    with pytest.raises(ImportError, match=says):
        extras.optional("rouge", "LongBench's ROUGE-L")


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert extras.install("eval") == "pip install '.[eval]' in kvjax's checkout"


def test_no_hint_asks_an_index_for_kvjax() -> None:
    """No package index has it under its name."""
    for file in [*ROOT.glob("kvjax/**/*.py"), *ROOT.glob("conversion/*.py"), *ROOT.glob("models/*.py")]:
        assert "pip install 'kvjax" not in file.read_text(), file
