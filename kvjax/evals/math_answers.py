"""Check the final answer of a solution, which is in a box or comes last, by value rather than spelling.

math-verify (Kydlíček et al., Hugging Face) parses expressions and compares them with sympy, in a separate process.
"""

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from kvjax._util.extras import optional

Extract = Literal["flexible", "strict"]
"""What counts as the answer: "strict" takes only the last box, "flexible" the last number or formula if there is no box."""

EXTRACTS = get_args(Extract)

SECONDS = 20
"""Maximum time for one answer; a process that takes longer is killed."""

_BOX = r"\\(?:boxed|fbox)\s*"
_THIN = r"(?:\{,\}|,\\!|\{?\\[,;:!\ ]\}?|\\thinspace\s*|~|[\u00a0\u2009\u202f])"
"""Separators of thousands that LaTeX sets: `{,}`, `,\\!`, thin and other spaces, and Unicode's."""

_BRACE = re.compile(
    rf"(?P<box>{_BOX}\{{)"
    # Without braces: a number, or a command or letter with what follows it in braces or as a digit.
    rf"|{_BOX}(?P<bare>-?\d+(?:[.,/]\d+)*|(?:\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))(?:\d|\{{[^{{}}]*\}})*)"
    r"|(?<!\\)[{}]"
)


@cache
def check() -> None:
    """Raise ImportError if math-verify is not installed."""
    optional("math_verify", "comparing answers to problems of mathematics")


def equals(solution: str, reference: str, extract: Extract = "flexible") -> bool:
    r"""Whether a solution's answer has the value of a reference in LaTeX, such as "42" or r"\frac{1}{2}".

    If the model thinks first, only the text after the thought counts; a thought that does not end has no answer. Thousands may be set with
    LaTeX's spaces, and in a box with a plain one. An answer that takes too long to compare is wrong.

    Raises:
        ImportError: math-verify is not installed.
    """
    check()
    said = spoken(solution)
    content = last_box(said)
    if content is None and extract == "strict":
        return False
    if content is None:
        return _worker().same(f"${reference}$", without_thousands(said))
    return _worker().same(f"${reference}$", f"\\boxed{{{_plain(content)}}}")


def without_thousands(text: str, spaces: bool = False) -> str:
    r"""The text with the separators of thousands removed that LaTeX sets, as in 1\,000 and 1{,}000.

    Args:
        spaces: whether plain spaces separate thousands too, as in a box.
    """
    separator = f"(?:{_THIN}| )" if spaces else _THIN
    grouped = rf"(?<![\d.])\d{{1,3}}(?:{separator}\d{{3}})+(?!\d)"
    return re.sub(grouped, lambda number: re.sub(separator, "", number[0]), text)


def _plain(box: str) -> str:
    r"""A box's content as math-verify can read it: "1 000" as 1000, "42." as 42, "11 5/6" as 11\frac{5}{6}."""
    text = without_thousands(box, spaces=True).rstrip()
    text = re.sub(r"(?<=\d)\.$", "", text)
    return re.sub(r"(?<![\d/.])(\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)


def spoken(solution: str) -> str:
    """The text after a model's thought: nothing if the thought does not end, everything if there is no thought."""
    return solution.rpartition("</think>")[2].partition("<think>")[0]


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed or has no braces, as in \boxed7; None if there is none."""
    opened: list[tuple[int, bool]] = []
    last, found = -1, None
    for brace in _BRACE.finditer(text):
        if brace["bare"] is not None:
            last, found = brace.start("bare"), brace["bare"]
        elif brace[0] != "}":
            opened.append((brace.end(), brace["box"] is not None))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last, found = start, text[start : brace.start()].strip()
    return found


class _Worker:
    """The process, which starts when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def same(self, reference: str, answer: str) -> bool:
        """Whether two texts have the same value; False if the comparison takes too long or crashes the process."""
        with self._lock:
            process = self._process = self._process or _started()
            assert process.stdin is not None
            assert process.stdout is not None
            clock = threading.Timer(SECONDS, process.kill)
            clock.start()
            found = ""
            try:
                process.stdin.write(json.dumps([reference, answer]) + "\n")
                process.stdin.flush()
                found = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                clock.cancel()
                if not found.endswith("\n"):
                    self.end()  # also after an interruption: its answer must not go to the next call
            return found.strip() == "true"

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            _end(self._process)
            self._process = None


def _started() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        _end(process)
        raise RuntimeError(
            "the process that compares answers does not start; look whether `import math_verify` works in a Python of its own"
        )
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, and waits
        pass


@cache
def _worker() -> _Worker:
    worker = _Worker()
    atexit.register(worker.end)
    return worker
