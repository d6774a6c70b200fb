"""GSM8K (Cobbe et al. 2021): word problems, after 8 or 50 solved examples (many-shot, ChunkKV section 4.1) or with reasoning."""

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from kvjax._util import json_lines

from .haystack import seeded
from .math_answers import last_box, spoken
from .math_problems import ASKED
from .task import Example, Format

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


@dataclasses.dataclass(frozen=True)
class GSM8K:
    r"""The solved examples are the context, which the policy compresses; the problem is the question.

    Without examples the problem is the context. The model is asked, in its chat template if it has one, to reason step by step and put
    its answer in \boxed{}, so the cache fills with long chains of thought.

    Attributes:
        file: problems, one JSON object with `question` and `answer` per line.
        examples_file: solved examples, in the same format; None for no examples.
        shots: number of solved examples; 50 in the published many-shot setting, which has more than 4k tokens.
        samples: number of problems, from the start of the file; None for all.
        extract: "strict" takes the number after "####" or in a box as the answer; "flexible" takes the last number if there is none.
        seed: random seed of the choice and order of examples, which are the same for all problems.
        max_new_tokens: of a solution; None for 256 after examples, and 1024 without.
    """

    file: str
    examples_file: str | None
    shots: int = 8
    samples: int | None = None
    extract: Literal["flexible", "strict"] = "flexible"
    seed: int = 0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.extract not in ("flexible", "strict"):
            raise ValueError(f"extract={self.extract!r}; give 'flexible' or 'strict'")
        if self.shots < 0 or any(number is not None and number < 1 for number in (self.samples, self.max_new_tokens)):
            raise ValueError(
                f"shots={self.shots}, samples={self.samples}, max_new_tokens={self.max_new_tokens}; give 0 or more shots, and 1 or more "
                "of the others, or None"
            )
        if self.shots and self.examples_file is None:
            raise ValueError(f"shots={self.shots}, but no examples_file; give a file of solved examples, or shots=0")

    def check(self) -> None:
        """Read the files, and raise the errors of `examples`."""
        _read(self.file)
        self._solved()

    @property
    def name(self) -> str:
        """gsm8k-SHOTS."""
        return f"gsm8k-{self.shots}"

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens of a solution."""
        return self.max_new_tokens or (256 if self.shots else 1024)

    def examples(self, form: Format) -> Sequence[Example]:
        """One for each problem.

        Raises:
            ValueError: a line of a file is not in GSM8K's format (JSON with a question, and an answer that ends in #### NUMBER), or there are
                fewer solved examples than `shots`.
        """
        if not self.shots:
            return [
                Example(
                    context=question,
                    question=f"\n\n{ASKED}",
                    answers=(_final(answer, "strict") or "",),
                    max_new_tokens=self.new_tokens,
                )
                for question, answer in _read(self.file)[: self.samples]
            ]
        shown = seeded(self.name, self.seed).sample(self._solved(), self.shots)
        context = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shown)
        return [
            Example(
                context=context,
                question=f"Question: {question}\nAnswer:",
                answers=(_final(answer, "strict") or "",),
                max_new_tokens=self.new_tokens,
                stop=("Question:",),
                chat=False,
            )
            for question, answer in _read(self.file)[: self.samples]
        ]

    def _solved(self) -> list[tuple[str, str]]:
        if self.examples_file is None:
            return []
        solved = _read(self.examples_file)
        if self.shots > len(solved):
            raise ValueError(f"shots={self.shots}; {self.examples_file} has {len(solved)} solved examples")
        return solved

    def score(self, answer: str, example: Example) -> float:
        """1 if the answer's number equals the reference, else 0."""
        found = _final(answer, self.extract)
        return float(found is not None and float(found) == float(example.answers[0]))


def _final(answer: str, extract: str) -> str | None:
    """The final number of an answer, as digits; None if there is none."""
    answer = re.sub(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)", ",", spoken(answer))  # LaTeX's thousands
    marked, box = re.search(rf"####\s*({_NUMBER})", answer), last_box(answer)
    if marked or box is not None:
        numbers = [marked[1]] if marked else re.findall(_NUMBER, box or "")
    else:
        numbers = re.findall(_NUMBER, answer) if extract == "flexible" else []
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
