"""A process that compares answers: reads pairs of expressions, one JSON list per line, and prints the results.

`math_answers` runs it as a file, so that only math-verify is loaded. A model's answer may keep sympy busy for hours, or
fill the memory. math-verify's timeouts are exceptions, which can get lost. A process can be killed.
"""

import json
import logging
import signal
import sys
from typing import Any

SECONDS = 5
"""Maximum time for parsing an expression, and for comparing two, by math-verify's timeouts."""


def main() -> None:
    """Answer until the input ends."""
    import math_verify as library

    answers, sys.stdout = sys.stdout, sys.stderr  # keeps other output out of the answers
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every expression that it cannot parse
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
