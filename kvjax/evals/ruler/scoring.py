"""RULER's two scores (Hsieh et al. 2024, section 3): how many of the references an answer contains, ignoring case."""

import re
from collections.abc import Sequence


def cleaned(answer: str) -> str:
    """The answer as RULER compares it: control characters become line breaks, surrounding white space is removed."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


def match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer contains: retrieval, tracing and aggregation."""
    text = cleaned(answer).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(answer: str, references: Sequence[str]) -> float:
    """1 if the answer contains any of the references, else 0: question answering."""
    text = cleaned(answer).lower()
    return float(any(reference.lower() in text for reference in references))
