"""GSM8K (Cobbe et al. 2021): word problems after solved examples; eight of them, or fifty (many-shot, ChunkKV section 4.1)."""

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from kvjax import json_lines

from .haystack import seeded
from .task import Example, Format

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


@dataclasses.dataclass(frozen=True)
class GSM8K:
    """The examples are what a cache policy compresses, the problem is the question.

    Attributes:
        file: problems, one JSON object with `question` and `answer` per line.
        examples_file: solved examples, in the same form.
        shots: how many of them come first; the published many-shot setting has 50, of more than 4k tokens.
        samples: how many problems, from the file's beginning; None takes all.
        extract: "flexible" takes the number after "####", or the answer's last one where there is none; "strict" only the former.
        seed: which examples, and in which order; the same for all problems.
    """

    file: str
    examples_file: str
    shots: int = 8
    samples: int | None = None
    extract: Literal["flexible", "strict"] = "flexible"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.extract not in ("flexible", "strict"):
            raise ValueError(f"extract={self.extract!r}; give 'flexible' or 'strict'")
        if self.shots < 1 or (self.samples is not None and self.samples < 1):
            raise ValueError(f"shots={self.shots}, samples={self.samples}; give 1 or more (samples may be None)")

    def check(self) -> None:
        """Read the files, and raise what `examples` would."""
        _read(self.file)
        self._solved()

    @property
    def name(self) -> str:
        """gsm8k-SHOTS."""
        return f"gsm8k-{self.shots}"

    def examples(self, form: Format) -> Sequence[Example]:
        """One for each problem.

        Raises:
            ValueError: a line of a file is not of GSM8K's form (JSON with a question, and an answer that ends in #### NUMBER), or it has fewer solved examples than are asked for.
        """
        shown = seeded(self.name, self.seed).sample(self._solved(), self.shots)
        context = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shown)
        return [
            Example(
                context=context,
                question=f"Question: {question}\nAnswer:",
                answers=(_final(answer, "strict") or "",),
                max_new_tokens=256,
                stop=("Question:",),
                chat=False,
            )
            for question, answer in _read(self.file)[: self.samples]
        ]

    def _solved(self) -> list[tuple[str, str]]:
        solved = _read(self.examples_file)
        if self.shots > len(solved):
            raise ValueError(f"shots={self.shots}; {self.examples_file} has {len(solved)} solved examples")
        return solved

    def score(self, answer: str, example: Example) -> float:
        """Whether the answer's number is the right one."""
        found = _final(answer, self.extract)
        return float(found is not None and float(found) == float(example.answers[0]))


def _final(answer: str, extract: str) -> str | None:
    """The number that an answer arrives at, in digits alone."""
    marked = re.search(rf"####\s*({_NUMBER})", answer)
    numbers = [marked[1]] if marked else re.findall(_NUMBER, answer) if extract == "flexible" else []
    return re.sub(r"[$,]", "", numbers[-1]) if numbers else None


class _Problem(BaseModel):
    question: str
    answer: str

    @field_validator("answer")
    @classmethod
    def _has_a_result(cls, answer: str) -> str:
        if _final(answer, "strict") is None:
            raise ValueError("does not end in #### NUMBER")
        return answer


@cache
def _read(file: str) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in json_lines.read(Path(file), _Problem)]
