"""A small checkpoint on disk, and a way to run the command line on it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from checkpoints import write_hf
from typer.testing import CliRunner

from kvjax.cli import app, progress
from kvjax.conversion import load
from kvjax.models import Params


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    write_hf(path, tokenizer=True)
    return path


@pytest.fixture(scope="session")
def params(checkpoint: Path) -> Params:
    """The same model, loaded."""
    return load(checkpoint)


built = functools.cache(typer.main.get_command)
"""Builds the command line once, as a process does. Typer's runner would for each test, which takes longer than most of them."""


@pytest.fixture
def kvjax_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`kvjax ARGUMENTS…` in this process; its result has exit_code, stdout and stderr."""
    monkeypatch.setenv("KVJAX_COMPILATION_CACHE", "0")
    monkeypatch.setattr("typer.testing._get_command", built)
    monkeypatch.setattr(progress, "PATIENCE", 1e6)  # what a slow machine makes of a test is not its subject

    def run(*arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run
