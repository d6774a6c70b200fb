"""GSM8K (Cobbe et al. 2021): word problems, after 8 or 50 solved examples (many-shot, ChunkKV section 4.1) or with reasoning."""

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from kvjax._util import json_lines

from . import math_answers
from .haystack import seeded
from .math_answers import last_box, spoken, without_thousands
from .math_problems import ASKED
from .task import Example, Format

_NUMBER = r"[-\u2212]?\$?-?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)"
_MARK = rf"####\s*({_NUMBER})"
_LONE_MARK = re.compile(rf"^{_MARK}\s*$", re.MULTILINE)
"""A mark whose line has nothing but the number; "#### 1. Find the eggs" is a heading."""

_COMPUTED = re.compile(r"\\[dt]?frac|\\sqrt|\\times|\\cdot|\\div|\\pi|[*^+]|/\s*[\d({\\]")
"""What makes the value of a box more than its first number."""


@dataclasses.dataclass(frozen=True)
class GSM8K:
    r"""The solved examples are the context, which the policy compresses; the problem is the question.

    Without examples the problem is the context. The model is asked, in its chat template if it has one, to reason step by step and put
    its answer in \boxed{}, so the cache fills with long chains of thought.

    After examples, the first number behind "####" is the answer, else the last box, else the last number. Without examples, the box comes
    first, and "####" counts only if nothing but the number is on its line, since models write headings like "#### 1. Find the eggs". Of a
    box counts the first number, without units; expressions are compared by math-verify.

    Attributes:
        file: problems, one JSON object with `question` and `answer` per line.
        examples_file: solved examples, in the same format; None for no examples.
        shots: number of solved examples; 50 in the published many-shot setting, which has more than 4k tokens.
        samples: number of problems, from the start of the file; None for all.
        extract: "strict" takes only a number after "####" or in a box as the answer; "flexible" takes the last number if there is none.
        seed: random seed of the choice and order of examples, which are the same for all problems.
        max_new_tokens: of a solution; None for 256 after examples, and 1024 without.

    Example:
        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "gsm8k.jsonl")
        ...     _ = file.write_text(json.dumps({"question": "How much is 6 * 7?", "answer": "#### 42"}))
        ...     task = kvjax.evals.GSM8K(str(file), examples_file=None, shots=0)
        ...     (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> example.answers, task.score("So it is 42.", example)
        (('42',), 1.0)
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
        """Read the files, and raise the errors of `examples` and `score`.

        Raises:
            ValueError: as `examples`.
            ImportError: the model is asked for a box, and math-verify is not installed.
        """
        _read(self.file)
        self._solved()
        if not self.shots:
            math_answers.check()

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
                    answers=(_marked(answer) or "",),
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
                answers=(_marked(answer) or "",),
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
        said, reference = without_thousands(spoken(answer)), example.answers[0]
        box = last_box(said)
        marked = (_LONE_MARK.findall(said) or [None])[-1] if box is None else None
        if self.shots:
            marked = _marked(said)
        if marked is None and box is not None:
            return float(_boxed(box, reference))
        if marked is None and self.extract == "flexible":
            marked = (re.findall(_NUMBER, said) or [None])[-1]
        return float(marked is not None and _value(marked) == _value(reference))


def _marked(answer: str) -> str | None:
    """The number after the first mark, as digits; None if there is none."""
    marked = re.search(_MARK, answer)
    return None if marked is None else f"{_value(marked[1]):.15g}"


def _value(number: str) -> float:
    return float(re.sub(r"[$,]", "", number).replace("\u2212", "-"))


def _boxed(box: str, reference: str) -> bool:
    r"""Whether a box has the reference's value.

    Units do not count: neither words nor \text{...} nor their exponents, unless the box has no other number. Of several numbers, the first
    counts; after an equals sign, the first behind the last one.
    """
    said = without_thousands(box, spaces=True).replace("\\$", "$").rpartition("=")[2]
    units = r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}"
    said = re.sub(rf"({units}|[a-zA-Z]+)\s*\^\s*(?:\d|\{{[^{{}}]*\}})", r"\1", said)
    plain = re.sub(units, " ", said)
    numbers = re.findall(_NUMBER, plain) or re.findall(_NUMBER, said)
    if _COMPUTED.search(plain.replace("^\\circ", "").replace("^{\\circ}", "")):
        return math_answers.equals(f"\\boxed{{{box}}}", reference)
    return bool(numbers) and _value(numbers[0]) == _value(reference)


class _Problem(BaseModel):
    question: str
    answer: str

    @field_validator("answer")
    @classmethod
    def _has_a_result(cls, answer: str) -> str:
        if _marked(answer) is None:
            raise ValueError("does not end in #### NUMBER")
        return answer


@cache
def _read(file: str) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in json_lines.read(Path(file), _Problem)]
