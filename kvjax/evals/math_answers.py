"""Whether a solution arrives at the right answer: what it puts in a box, or else the last thing it says, by value and not by spelling.

Expressions are read and compared by math-verify (Kydlíček et al., Hugging Face), which has sympy compute with them.
"""

import logging
import threading
from functools import cache
from typing import Any, Literal, get_args

from kvjax.extras import optional

Extract = Literal["flexible", "strict"]
"""What counts as the answer: what is in the last box, or "strict" only that and "flexible" the last number or formula where there is none."""

EXTRACTS = get_args(Extract)

SECONDS = 5
"""Most time for reading an answer, and for comparing it."""

_BOXES = ("\\boxed", "\\fbox")
_THOUGHT = "</think>"


def check() -> None:
    """Raise ImportError if what compares answers is not installed."""
    _library()


def equals(solution: str, reference: str, extract: Extract = "flexible") -> bool:
    r"""Whether a solution's answer has the value of a reference in LaTeX, such as "42" or r"\frac{1}{2}".

    Of a model that thinks first, what follows the thought counts. An answer that takes too long to compute with is wrong.

    Raises:
        ImportError: math-verify is not installed.
    """
    library, spoken = _library(), solution.rpartition(_THOUGHT)[2]
    content = last_box(spoken)
    if content is None and extract == "strict":
        return False
    # Its clock is a signal, which only the main thread gets; elsewhere there is none.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    read = {"extraction_config": _forms(), "parsing_timeout": seconds}
    expected = library.parse(f"${reference}$", **read)
    found = library.parse(spoken if content is None else f"\\boxed{{{content}}}", **read)
    return bool(library.verify(expected, found, timeout_seconds=seconds))


def last_box(text: str) -> str | None:
    r"""What is in the last \boxed{...} that is closed; None if there is none."""
    at = len(text)
    while (at := max(text.rfind(box, 0, at) for box in _BOXES)) >= 0:
        start = text.find("{", at)
        if start < 0 or text[at:start].strip() not in _BOXES:
            continue
        depth = 0
        for i in range(start, len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start + 1 : i].strip()
    return None


@cache
def _library() -> Any:
    found = optional("math_verify", "comparing answers to problems of mathematics")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whatever it cannot read
    return found


@cache
def _forms() -> list[Any]:
    library = _library()
    return [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
