"""A process that compares answers: reads pairs of expressions from its input, a JSON list a line, and writes whether they have one value.

Run as a file by `math_answers`, so that only math-verify is loaded. What a model wrote may keep sympy busy for hours or fill the memory, and
the clocks of math-verify are exceptions, which may be lost on their way; a process can be ended.
"""

import json
import logging
import signal
import sys
from typing import Any

SECONDS = 5
"""Most time for reading an expression, and for comparing two, by the clocks of math-verify."""


def main() -> None:
    """Answer until the input ends."""
    import math_verify as library

    answers, sys.stdout = sys.stdout, sys.stderr  # so that nobody else's words come between
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs whatever it cannot read
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
