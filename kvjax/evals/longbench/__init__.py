"""LongBench (Bai et al. 2023, "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding"): 21 tasks.

Prompts and answer lengths in `tasks.json` are LongBench's (MIT licence, Copyright 2023 THU-KEG & Zhipu AI). The user supplies the data,
LongBench's jsonl files.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from kvjax._util import json_lines
from kvjax._util.json_lines import Listed
from kvjax.evals.task import Example, Format

from . import metrics as metrics


@cache
def tasks() -> dict[str, dict[str, Any]]:
    """The 21 tasks by name: `prompt`, `max_new_tokens`, `metric`, whether only the `first_line` of an answer counts (few-shot tasks),
    and whether chat models use their `chat` template.
    """
    return json.loads(resources.files(__name__).joinpath("tasks.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class LongBench:
    """One of the tasks.

    Attributes:
        task: its name, a key of `tasks()`.
        file: its data, one JSON object per line.
        max_length: maximum number of tokens of a prompt; the middle of a longer prompt is removed. LongBench uses 500 to 1500 less than
            a model's window: 3500 for 4k, 31500 for 32k.
        samples: number of rows, from the start of the file; None for all.

    Example:
        >>> import json, pathlib, tempfile
        >>> row = {"context": "Call me Ishmael.", "input": "Who calls?", "answers": ["Ishmael"], "all_classes": None}
        >>> row |= {"length": 3, "dataset": "qasper", "language": "en", "_id": "1"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "qasper.jsonl")
        ...     _ = file.write_text(json.dumps(row))
        ...     task = kvjax.evals.LongBench("qasper", str(file))
        ...     (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> task.score("Ishmael", example)
        1.0
    """

    task: str
    file: str
    max_length: int = 31500
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.task not in tasks():
            raise ValueError(f"unknown LongBench task {self.task!r}; there are {', '.join(tasks())}")
        if self.max_length < 2 or (self.samples is not None and self.samples < 1):
            raise ValueError(
                f"max_length={self.max_length}, samples={self.samples}; give 2 or more, and 1 or more or None"
            )

    def check(self) -> None:
        """Read the file, and raise what `examples` or the task's metric would.

        Raises:
            ValueError: as `examples`.
            ImportError: a package that the metric needs is not installed.
        """
        self._rows()
        metrics.check(tasks()[self.task]["metric"])

    @property
    def name(self) -> str:
        """longbench-TASK."""
        return f"longbench-{self.task}"

    def examples(self, form: Format) -> Sequence[Example]:
        """The rows of the file. The part of the prompt after the context is the question.

        Raises:
            ValueError: a line of the file is not in LongBench's format.
        """
        task, found = tasks()[self.task], []
        before, after = task["prompt"].split("{context}")
        for row in self._rows():
            context, question = truncated(
                form, before + row.context, after.replace("{input}", row.input), self.max_length
            )
            found.append(
                Example(
                    context=context,
                    question=question,
                    answers=tuple(row.answers),
                    max_new_tokens=task["max_new_tokens"],
                    chat=task["chat"],
                    labels={"length": row.length},
                    choices=tuple(row.all_classes or ()) if self._classifies else (),
                )
            )
        return found

    def score(self, answer: str, example: Example) -> float:
        """The best score over all references."""
        task = tasks()[self.task]
        if task["first_line"]:
            answer = answer.lstrip("\n").split("\n")[0]
        metric, extra = getattr(metrics, task["metric"]), (example.choices,) if self._classifies else ()
        return max(metric(answer, reference, *extra) for reference in example.answers)

    def _rows(self) -> list["_Row"]:
        return json_lines.read(Path(self.file), _Classified if self._classifies else _Row, max_lines=self.samples)

    @property
    def _classifies(self) -> bool:
        return tasks()[self.task]["metric"] == "classification"


class _Row(BaseModel):
    context: str
    input: str
    answers: Listed[str] = Field(min_length=1)
    all_classes: Listed[str] | None
    length: int


class _Classified(_Row):
    all_classes: Listed[str] = Field(min_length=1)  # pyright: ignore[reportIncompatibleVariableOverride]


def truncated(form: Format, context: str, question: str, max_length: int) -> tuple[str, str]:
    """Context and question, without their middle if together they have more than `max_length` tokens."""
    tokens = form.tokenizer.encode(context + question)
    if len(tokens) <= max_length:
        return context, question
    half = max_length // 2
    start, end = form.tokenizer.decode(tokens[:half]), form.tokenizer.decode(tokens[-half:])
    if end.endswith(question):
        return start + end.removesuffix(question), question
    return start, end  # the question is so long that it is truncated itself
