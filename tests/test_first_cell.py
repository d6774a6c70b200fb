"""What a notebook's first cell does where there is an accelerator, with files and pip's answers put in place of a machine's."""

import importlib.metadata
import shutil
import subprocess
import sys

import jax
import pytest

from kvjax import notebooks


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Pretends that a machine has these accelerators and distributions; the list of commands that are run there."""

    def pretend(tpu=False, gpu=False, distributions=None, status=0):
        commands, real = [], importlib.metadata.version
        found = {"jax": jax.__version__, **(distributions or {})}

        def version(name):
            if name.startswith("jax-cuda") and name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found.get(name) or real(name)

        def run(command, check):
            commands.append(command)
            return subprocess.CompletedProcess(command, status)

        (tmp_path / "accel0").touch()
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setattr(notebooks, "TPU_FILES", (str(tmp_path / "none"), str(tmp_path / "accel0"))[: 1 + tpu])
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return pretend


def pip(requirement):
    return [sys.executable, "-m", "pip", "install", "--quiet", requirement]


def test_a_cpu_needs_nothing_more(machine, capsys):
    commands = machine()
    assert notebooks.prepare() == jax.devices()[0]
    assert commands == []
    assert capsys.readouterr().out == f"jax {jax.__version__} on cpu\n"


@pytest.mark.parametrize(
    ("there", "needed"),
    [
        ({"tpu": True}, "tpu"),
        ({"gpu": True}, "cuda12"),
        ({"gpu": True, "distributions": {"jax-cuda12-plugin": "0.4.1"}}, "cuda12"),
        ({"gpu": True, "distributions": {"jax-cuda12-plugin": jax.__version__}}, None),
        ({"gpu": True, "distributions": {"jax-cuda13-plugin": jax.__version__}}, None),
    ],
)
def test_an_accelerator_gets_what_belongs_to_this_jax(machine, there, needed):
    commands = machine(**there)
    notebooks.prepare()
    assert commands == ([pip(f"jax[{needed}]=={jax.__version__}")] if needed else [])


def test_without_it_there_is_a_way_on(machine, monkeypatch):
    commands = machine(gpu=True, status=1)
    with pytest.raises(RuntimeError, match=r"pip install --quiet jax\[cuda12\]==.*JAX_PLATFORMS=cpu"):
        notebooks.prepare()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebooks.prepare()
    assert len(commands) == 1
