"""The command line as a process of its own: start-up, terminals and pipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax.models import Params

ROOT = Path(kvjax.__file__).parents[1]
KVJAX = [sys.executable, "-m", "kvjax"]


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_COMPILATION_CACHE": "0", "TERM": "xterm"}


def test_version(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([*KVJAX, "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvjax {kvjax.__version__}\n", "")


def test_help_does_not_wait_for_jax(environment: dict[str, str]) -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from kvjax.cli import app\n"
        "for command in ([], ['generate'], ['convert'], ['policies'], ['inspect'], ['draw']):\n"
        "    assert 'Usage' in CliRunner().invoke(app, [*command, '--help']).stdout\n"
        "print(*sorted({'jax', 'numpy', 'flax', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_a_reader_that_goes_away(environment: dict[str, str]) -> None:
    process = subprocess.Popen([*KVJAX, "policies"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        complaints = stream.read()
    assert (process.wait(), complaints) == (141, b"")


def test_a_terminal_shows_prompt_text_and_summary(
    environment: dict[str, str], checkpoint: Path, params: Params
) -> None:
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    command = [*KVJAX, "generate", "--model", str(checkpoint), "--max-new-tokens", "12"]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        process = subprocess.Popen([*command, "hello"], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = b""
        try:
            while chunk := terminal.read1(65536):
                seen += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    assert process.wait() == 0
    shown = seen.decode().replace("\r\n", "\n")
    assert f"\x1b[2mhello\x1b[0m{kvjax.generate(params, 'hello', max_new_tokens=12).text}\n" in shown
    assert "2 + 12 tokens" in shown
    assert "Compiling" in shown
