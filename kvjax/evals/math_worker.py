"""A process that compares answers: it reads pairs of expressions, one JSON list per line, and writes whether their values are equal.

`math_answers` runs it as a file, so that only math-verify is loaded. A model's text may keep sympy busy for hours or fill the memory.
math-verify's timeouts are exceptions, which sympy may swallow; a process can be killed.
"""

import json
import logging
import signal
import sys
from typing import Any

SECONDS = 5
"""math-verify's timeout for parsing an expression, and for comparing two."""


def main() -> None:
    """Answer until the input ends."""
    import math_verify as library

    answers, sys.stdout = sys.stdout, sys.stderr  # other prints must not mix with answers
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whatever it cannot parse
    forms = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    seconds: Any = SECONDS if hasattr(signal, "SIGALRM") else None

    def parsed(text: str) -> Any:
        return library.parse(text, extraction_config=forms, parsing_timeout=seconds)

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        expected, found = map(parsed, json.loads(line))
        print(json.dumps(bool(library.verify(expected, found, timeout_seconds=seconds))), file=answers, flush=True)


if __name__ == "__main__":
    main()
