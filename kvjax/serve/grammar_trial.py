"""Tries to make a grammar in a process of its own, within limits on time and memory, as llguidance has none for this.

    python -I -S grammar_trial.py json|lark DIRECTORY < TEXT

It runs as a script, too, which imports llguidance from the directory and nothing of kvjax. The limits need Linux or macOS; on
other systems only time is limited.
"""

import functools
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

CPU_SECONDS = 0.5
"""Processor time that a grammar may take, in seconds. One of a schema with a thousand properties takes a third of it."""

SECONDS = 20
"""Time that a grammar may take, even on a busy machine."""

MEMORY = 1 << 30
"""Bytes of memory of the process."""

Kind = Literal["json", "lark"]
"""A JSON schema, or llguidance's variant of Lark."""


@functools.lru_cache(maxsize=64)
def check(kind: Kind, text: str) -> None:
    """Do nothing if a grammar can be made within the limits. Its errors are found when it is made.

    Raises:
        ValueError: it exceeds the limits.
    """
    origin = getattr(importlib.util.find_spec("llguidance"), "origin", None)
    assert origin is not None
    command = [sys.executable, "-I", "-S", __file__, kind, str(Path(origin).parents[1])]
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    try:
        ended = subprocess.run(command, input=text.encode(), timeout=SECONDS, check=False, **how)
    except subprocess.TimeoutExpired:
        ended = None
    if ended is None or ended.returncode != 0:
        raise ValueError(f"it takes more than {CPU_SECONDS:g} s or {MEMORY >> 20} MiB to prepare; send a simpler one")


def _limit() -> None:
    try:
        import resource
    except ImportError:  # not available on Windows
        return
    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # then a signal ends the process


def _main() -> None:
    """Make the grammar for a vocabulary of bytes: the work on its regular expressions is that of any vocabulary."""
    kind, directory = sys.argv[1:]
    sys.path.append(directory)
    import llguidance

    text = sys.stdin.buffer.read().decode()
    _limit()
    matcher = llguidance.LLMatcher
    convert = matcher.grammar_from_json_schema if kind == "json" else matcher.grammar_from_lark
    try:
        matcher(llguidance.LLTokenizer("byte"), convert(text), log_level=0)
    except ValueError:  # the server finds the same error, and tells the client
        return


if __name__ == "__main__":
    _main()
