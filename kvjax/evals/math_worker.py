"""A process that compares answers: it reads pairs of expressions, one JSON list per line, and writes whether their values are equal.

`math_answers` runs it as a file, so that only math-verify is loaded. A model's text may keep sympy busy for hours or fill the memory.
math-verify's timeouts are exceptions, which sympy may swallow; a process can be killed.
"""

import contextlib
import itertools
import json
import logging
import signal
import sys
from typing import Any

SECONDS = 5
"""math-verify's timeout for parsing an expression, and for comparing two."""


SMALL, CLOSE = 1e-3, 1e-5
"""Numbers below `SMALL` are equal if they differ by at most `CLOSE` of the larger one."""


def main() -> None:
    """Answer until the input ends."""
    import math_verify as library

    answers, sys.stdout = sys.stdout, sys.stderr  # other prints must not mix with answers
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whatever it cannot parse
    forms = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    seconds: Any = SECONDS if hasattr(signal, "SIGALRM") else None

    def parsed(text: str) -> Any:
        return library.parse(text, extraction_config=forms, parsing_timeout=seconds)

    def same(expected: Any, found: Any) -> bool:
        """As math-verify says, which rounds to six decimals. Small numbers also have to be equal relative to their size."""
        if not library.verify(expected, found, timeout_seconds=seconds):
            return False
        with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
            size = max(abs(expected), abs(found))
            return not size < SMALL or bool(abs(expected - found) <= CLOSE * size)
        return True  # not numbers

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        expected, found = map(parsed, json.loads(line))
        print(json.dumps(any(same(*pair) for pair in itertools.product(expected, found))), file=answers, flush=True)


if __name__ == "__main__":
    main()
