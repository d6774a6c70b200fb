r"""Competition problems with boxed answers: MATH-500 (Hendrycks et al. 2021, Lightman et al. 2023) and AIME."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import AliasChoices, BaseModel, Field

from kvjax import json_lines

from . import math_answers
from .math_answers import EXTRACTS, Extract
from .task import Example, Format

Benchmark = Literal["math500", "aime"]

ASKED = "Please reason step by step, and put your final answer within \\boxed{}."
"""The prompt of Qwen2.5-Math and DeepSeek-R1."""

_NEW_TOKENS = {"math500": 2048, "aime": 8192}


@dataclasses.dataclass(frozen=True)
class MathProblems:
    """A cache policy compresses the problem before the model reasons. The question is the request to reason.

    Attributes:
        file: problems, as JSON lines or as one list. MATH-500 has `problem` and `answer`, and optionally `subject` and
            `level`, by which results are broken down. AIME has `problem` (or `question`) and `answer`, a whole number.
        benchmark: "math500", whose answers are formulas, or "aime", whose answers are 0 to 999.
        samples: number of problems from the beginning of the file. None for all.
        max_new_tokens: maximum tokens of a solution. None for 2048 (MATH-500) and 8192 (AIME). Published results of
            reasoning models allow 16384 and more.
        extract: "strict" accepts only boxed answers. "flexible" otherwise accepts the last formula or number.
    """

    file: str
    benchmark: Benchmark = "math500"
    samples: int | None = None
    max_new_tokens: int | None = None
    extract: Extract = "flexible"

    def __post_init__(self) -> None:
        if self.benchmark not in get_args(Benchmark):
            raise ValueError(f"benchmark={self.benchmark!r} is unknown. Give one of {', '.join(get_args(Benchmark))}.")
        if self.extract not in EXTRACTS:
            raise ValueError(f"extract={self.extract!r} is unknown. Give 'flexible' or 'strict'.")
        if any(number is not None and number < 1 for number in (self.samples, self.max_new_tokens)):
            raise ValueError(
                f"samples={self.samples}, max_new_tokens={self.max_new_tokens}: a number is too small. Give 1 or more, or None."
            )

    def check(self) -> None:
        """Read the file, and raise the errors of `examples` and `score`.

        Raises:
            ValueError: as `examples`.
            ImportError: the package that compares answers is not installed.
        """
        self._problems()
        math_answers.check()

    @property
    def name(self) -> str:
        """math500 or aime."""
        return self.benchmark

    def examples(self, form: Format) -> Sequence[Example]:
        """One example per problem.

        Raises:
            ValueError: a row of the file has no problem or answer, or an answer of AIME is not a whole number from 0 to
                999.
        """
        return [
            Example(
                context=problem.problem,
                question=f"\n\n{ASKED}",
                answers=(str(problem.answer),),
                max_new_tokens=self.max_new_tokens or _NEW_TOKENS[self.benchmark],
                labels={name: value for name in ("level", "subject") if (value := getattr(problem, name)) is not None},
            )
            for problem in self._problems()
        ]

    def score(self, answer: str, example: Example) -> float:
        """Whether the answer has the reference's value."""
        return float(math_answers.equals(answer, example.answers[0], self.extract))

    def _problems(self) -> list["_Problem"]:
        found = json_lines.read_rows(Path(self.file), _Problem, self.samples)
        if self.benchmark == "aime":
            for row in found:
                text = str(row.answer).strip()
                if not (text.isascii() and text.isdecimal() and int(text) <= 999):
                    raise ValueError(
                        f"{self.file}: answer {row.answer!r} is not a whole number from 0 to 999, as AIME's are"
                    )
        return found


class _Problem(BaseModel):
    problem: str = Field(validation_alias=AliasChoices("problem", "Problem", "question"), min_length=1)
    answer: str | int = Field(validation_alias=AliasChoices("answer", "Answer"))
    subject: str | None = None
    level: int | str | None = None
