r"""Competition problems, whose solutions end in \boxed{...}: MATH-500 (Hendrycks et al. 2021, Lightman et al. 2023), and AIME's."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import AliasChoices, BaseModel, Field

from kvjax._util import json_lines

from . import math_answers
from .math_answers import EXTRACTS, Extract
from .task import Example, Format

Benchmark = Literal["math500", "aime"]

ASKED = "Please reason step by step, and put your final answer within \\boxed{}."
"""The prompt of Qwen2.5-Math and DeepSeek-R1."""

_NEW_TOKENS = {"math500": 2048, "aime": 8192}


@dataclasses.dataclass(frozen=True)
class MathProblems:
    """The problem is the context, which the policy compresses; the request to reason is the question.

    Attributes:
        file: problems, as JSON lines or as one list. Rows of MATH-500 have `problem`, `answer` and optionally `subject` and `level`, by which
            results are broken down. Rows of AIME have `problem` (or `question`) and `answer`, a whole number.
        benchmark: "math500", whose answers are formulas, or "aime", whose answers are from 0 to 999.
        samples: number of problems, from the start of the file; None for all.
        max_new_tokens: of a solution; None for 2048 in MATH-500 and 8192 in AIME. Published results of reasoning models use 16384 or more.
        extract: "strict" takes only a boxed answer; "flexible" takes the last formula or number if nothing is boxed.

    Example:
        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "aime.jsonl")
        ...     _ = file.write_text(json.dumps({"problem": "How much is 6 * 7?", "answer": "42"}))
        ...     task = kvjax.evals.MathProblems(str(file), benchmark="aime")
        ...     (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> example.answers, task.score("So it is 42.", example)
        (('42',), 1.0)
    """

    file: str
    benchmark: Benchmark = "math500"
    samples: int | None = None
    max_new_tokens: int | None = None
    extract: Extract = "flexible"

    def __post_init__(self) -> None:
        if self.benchmark not in get_args(Benchmark):
            raise ValueError(f"benchmark={self.benchmark!r}; give one of {', '.join(get_args(Benchmark))}")
        if self.extract not in EXTRACTS:
            raise ValueError(f"extract={self.extract!r}; give 'flexible' or 'strict'")
        if any(number is not None and number < 1 for number in (self.samples, self.max_new_tokens)):
            raise ValueError(
                f"samples={self.samples}, max_new_tokens={self.max_new_tokens}; give 1 or more of each, or None"
            )

    def check(self) -> None:
        """Read the file, and raise the errors of `examples` and `score`.

        Raises:
            ValueError: as `examples`.
            ImportError: math-verify is not installed.
        """
        self._problems()
        math_answers.check()

    @property
    def name(self) -> str:
        """math500 or aime."""
        return self.benchmark

    def examples(self, form: Format) -> Sequence[Example]:
        """One for each problem.

        Raises:
            ValueError: a row of the file has no problem or answer, or an answer of AIME is not a whole number from 0 to 999.
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
        """1 if the answer has the reference's value, else 0."""
        return float(math_answers.equals(answer, example.answers[0], self.extract))

    def _problems(self) -> list["_Problem"]:
        found = json_lines.read_rows(Path(self.file), _Problem, self.samples)
        if self.benchmark == "aime":
            for row in found:
                text = str(row.answer).strip()
                if not (text.isascii() and text.isdecimal() and int(text) <= 999):
                    raise ValueError(f"{self.file}: answer {row.answer!r}; AIME's are whole numbers from 0 to 999")
        return found


class _Problem(BaseModel):
    problem: str = Field(validation_alias=AliasChoices("problem", "Problem", "question"), min_length=1)
    answer: str | int = Field(validation_alias=AliasChoices("answer", "Answer"))
    subject: str | None = None
    level: int | str | None = None
