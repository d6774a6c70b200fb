"""The command line as a process of its own: start-up, terminals and pipes."""

import json
import os
import signal
import subprocess
import sys
import time
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
        "for command in ([], ['generate'], ['convert'], ['policies'], ['inspect'], ['plan'], ['draw'], ['serve'], ['chat']):\n"
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


@pytest.mark.parametrize("arguments", [["policies", "--json"], ["--help"]])
def test_head_takes_the_first_line(environment: dict[str, str], arguments: list[str]) -> None:
    """`| head -1`, of outputs that a pipe takes whole and of those that it does not."""
    command = " ".join([sys.executable, "-m", "kvjax", *arguments])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)
    assert done.stdout.count("\n") == 1


CLOSED, FULL = "error: standard output: it is closed\n", "error: standard output: No space left on device\n"
STREAMS = [
    ("--version >&-", 1, CLOSED),
    ("--version >/dev/full", 1, FULL),
    ("--version 2>/dev/full", 0, ""),
    ("--version <&- 2>&-", 0, ""),
    ("--version >&- 2>&- <&-", 1, ""),
    ("generate --help >/dev/full", 1, FULL),
    ("policies >/dev/full", 1, FULL),
    ("policies >/dev/full 2>/dev/full", 1, ""),
    ("policies --json >&-", 1, '{"error": "standard output: it is closed", "type": "OSError"}\n'),
    ("policies --json 2>&-", 0, ""),
    ("generate --nope 2>/dev/full", 2, ""),
    ("generate --policy nope x 2>&-", 1, ""),
    ("generate <&-", 1, "error: standard input: it is closed; give the prompt as an argument\n"),
    ("draw - <&-", 1, "error: standard input: it is closed; give the prompt as an argument\n"),
    ("generate </dev/zero", 1, "error: standard input: more than 16777216 characters; give a shorter prompt\n"),
    ("generate <<<$'a\\xff'", 1, "error: standard input: not utf-8 text (invalid start byte at byte 1)\n"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), STREAMS, ids=[arguments for arguments, _, _ in STREAMS])
def test_streams_that_are_closed_full_or_endless(
    environment: dict[str, str], arguments: str, code: int, says: str
) -> None:
    """One line says so, if there is where to say it, and the exit code is that of the command unless its output is lost."""
    environment.pop("PYTHONUNBUFFERED", None)  # what is buffered fails when Python ends
    script = f"{sys.executable} -m kvjax {arguments}"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, says)


def test_a_locale_that_knows_ascii_alone(environment: dict[str, str], tmp_path: Path) -> None:
    """Arguments, paths, files, input and output are in UTF-8 then."""
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str]:
        done = subprocess.run([*KVJAX, *arguments], env=environment, input=stdin, capture_output=True, cwd=tmp_path)
        return done.returncode, (done.stdout + done.stderr).decode()

    code, text = run("policies")
    assert code == 0
    assert "Jégou" in text
    assert run("generate", "x", "--policy", "trée")[1].startswith("error: unknown policy 'trée'. Known policies: ")
    (tmp_path / "ä.txt").write_bytes(b"\xff")
    assert run("generate", "-f", "ä.txt") == (1, "error: ä.txt: not UTF-8 text (invalid start byte at byte 0)\n")


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_disk_that_is_full(environment: dict[str, str], checkpoint: Path, tmp_path: Path, format: str) -> None:
    """A limit on the size of files stands for it."""
    script = (
        "import resource, sys; from kvjax.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); sys.argv[0] = 'kvjax'; main()"
    )
    command = [sys.executable, "-c", script, "convert", str(checkpoint), "model", "--format", format]
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # modules' bytecode would be cut short as well
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: model: File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_python_ends(environment: dict[str, str]) -> None:
    script = (
        "import atexit, os, signal, sys, time; from kvjax.__main__ import main\n"
        "atexit.register(time.sleep, 30); atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['kvjax', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout, done.stderr) == (130, f"kvjax {kvjax.__version__}\n", "")


@pytest.mark.filterwarnings("default:positions up to")
def test_ctrl_c_leaves_results_that_a_next_run_goes_on_with(
    environment: dict[str, str], checkpoint: Path, tmp_path: Path, kvjax_command
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["eval", "needle-passkey", "--model", str(checkpoint), "--no-chat", "--length", "230", "--depths", "0"]
    arguments += ["--batch", "1", "--out", str(out), "--json", "--samples"]

    def rows() -> list[str]:
        return out.read_text().split("\n")[1:-1] if out.exists() else []

    command = [*KVJAX, *arguments, "200"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(rows()) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert {next(iter(json.loads(line))) for line in stderr.split("\n")[:-1]} <= {"warning", "progress"}
    kept = rows()
    assert 3 <= len(kept) < 200
    # Begin a run of fewer examples, of which these are the first, so that the next run has only one left.
    _, *lines = out.read_text().split("\n")
    out.unlink()
    assert kvjax_command(*arguments, len(kept) + 1).exit_code == 0
    header, *_ = out.read_text().split("\n")
    out.write_text("\n".join([header, *lines]))
    done = kvjax_command(*arguments, len(kept) + 1)
    assert done.exit_code == 0, done.stderr
    assert rows()[:-1] == kept
    assert json.loads(done.stdout)["count"] == len(kept) + 1


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5])
def test_ctrl_c_while_libraries_start_up(environment: dict[str, str], checkpoint: Path, seconds: float) -> None:
    """JAX and its compiled parts are in the middle of being imported; or, on a fast machine, a model loaded and the prompt waited for."""
    command, pipe = [*KVJAX, "generate", "--model", str(checkpoint)], subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode in (130, -signal.SIGINT)  # the latter before Python itself has started


@pytest.mark.parametrize(
    ("ends", "seen"), [("raise KeyboardInterrupt", ""), ("return 130", ""), ("return 1", "unloaded\n")]
)
def test_nothing_is_unloaded_after_ctrl_c(environment: dict[str, str], ends: str, seen: str) -> None:
    """XLA's threads may still run, and crash then. What is to be done at the end of Python is done, and output is flushed."""
    script = (
        "import atexit, os, sys, kvjax.__main__ as command\n"
        "class Unloaded:\n    def __del__(self, write=os.write): write(2, b'unloaded\\n')\n"
        "kept = Unloaded()\n"
        "def run():\n    atexit.register(os.write, 2, b'cleaned up\\n'); print('shown')\n"
        f"    {ends}\n"
        "command.run = run; command.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1 if seen else 130, "shown\n")
    assert done.stderr == "cleaned up\n" + seen


def test_ctrl_c_in_a_callback_is_not_lost(environment: dict[str, str]) -> None:
    """Python drops what is raised there; other errors it tells as ever."""
    script = (
        "import gc, signal, sys, time; from kvjax.__main__ import unraisable; sys.unraisablehook = unraisable\n"
        "def once(phase, info):\n"
        "    gc.callbacks.clear()\n"
        "    {}\n"
        "gc.callbacks.append(once); gc.collect(); time.sleep({})"
    )
    for raised, seconds, seen in (
        ("signal.raise_signal(signal.SIGINT)", 30, True),
        ("raise ValueError('odd')", 0, False),
    ):
        command = [sys.executable, "-c", script.format(raised, seconds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=25)
        assert (done.returncode == -signal.SIGINT) == seen
        assert ("ignored" in done.stderr) == (not seen)
