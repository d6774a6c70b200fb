"""Tasks by name, made from a few inputs: lengths, samples, a seed, files."""

import dataclasses
from pathlib import Path
from typing import cast, get_args

from kvjax._util.suggestions import hint, same
from kvjax._util.texts import read_text
from kvjax._util.user_code import load_module

from . import longbench, ruler
from .gsm8k import GSM8K
from .math_problems import Benchmark, MathProblems
from .multi_query import MultiQuery, ScoreBy
from .needle import Kind, NeedleInAHaystack
from .task import History, Task

_TEMPLATE = 64
"""Tokens left for the chat template around a prompt of LongBench that is cut to a model's window."""

MEASURES = ("perplexity", "fidelity")
"""Tasks that are measured on a text; there are no answers to score."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What named tasks are made from; each task uses what it has a use for.

    Attributes:
        lengths: tokens of prompt and answer, or of the text; None for the task's own. Only needle tasks take several.
        samples: number of examples, in needle tasks for each length and depth; None for 1 in needle tasks, 20 in RULER, otherwise all.
        seed: random seed.
        depths: of needles, as fractions of the haystack.
        text: plain text: a haystack, or what perplexity and fidelity are measured on.
        data: LongBench's jsonl file or the folder of them, problems of GSM8K, MATH-500 or AIME, contexts with many questions, or the
            questions of RULER's QA tasks.
        examples: GSM8K's solved examples.
        shots: number of solved examples; with 0, GSM8K asks the model to reason.
        window, stride: tokens of a window, and from the start of one window to that of the next, to measure perplexity in windows instead of
            streaming.
        queries: tokens at the text's end whose attention fidelity compares.
        max_new_tokens: of an answer to problems of mathematics and to questions of one context; None for the task's own.
        history: what the questions of one context follow, see `MultiQuery`.
        score_by: how answers to them are scored, see `MultiQuery`.
    """

    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    seed: int = 0
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    text: Path | None = None
    data: Path | None = None
    examples: Path | None = None
    shots: int = 8
    window: int | None = None
    stride: int | None = None
    queries: int = 32
    max_new_tokens: int | None = None
    history: History = "reference"
    score_by: ScoreBy = "any"

    def length(self, default: int) -> int:
        """The length, for tasks that take only one.

        Raises:
            ValueError: several are given.
        """
        if self.lengths is not None and len(self.lengths) != 1:
            raise ValueError(f"lengths {self.lengths}: only needle tasks take several; give one")
        return default if self.lengths is None else self.lengths[0]

    def read_text(self) -> str | None:
        """The text, or None if none is given."""
        return None if self.text is None else read_text(self.text)

    def file(self, field: str, what: str) -> str:
        """The path that `field` has.

        Raises:
            ValueError: no path is given.
        """
        path: Path | None = getattr(self, field)
        if path is None:
            raise ValueError(f"no {what}; give it as --{field} FILE")
        return str(path)


def task_names() -> tuple[str, ...]:
    """The names of all tasks: the `MEASURES`, and those that `make_task` makes."""
    needles = (f"needle-{kind}" for kind in get_args(Kind))
    named = (f"longbench-{name}" for name in longbench.tasks())
    return (*MEASURES, *needles, *ruler.TASKS, *named, "gsm8k", *get_args(Benchmark), "multi-query")


def task_name(asked: str) -> str:
    """The name in `task_names` that has the same letters and digits, whatever their case.

    Raises:
        ValueError: there is no such task. The message names all tasks and the most similar one.
    """
    found = same(asked, task_names())
    if found is None:
        raise ValueError(f"unknown task {asked!r}; there are {', '.join(task_names())}.{hint(asked, task_names())}")
    return found


def find_task(text: str) -> str | Task:
    """The task that a command is given: a name of `task_names`, or the user's own as "FILE.py:NAME" or "MODULE:NAME".

    Raises:
        ValueError: there is no such task, or it lacks part of a `Task`.
        FileNotFoundError, ImportError: the module cannot be loaded.
    """
    source, colon, name = text.rpartition(":")
    if not colon:
        return task_name(text)
    module = load_module(source)
    if not hasattr(module, name):
        raise ValueError(f"{text}: {source} has no {name!r}; give a task that it defines.{hint(name, vars(module))}")
    task = getattr(module, name)
    try:
        task = task() if isinstance(task, type) else task
    except TypeError as error:
        raise ValueError(f"{text}: {error}; give the task's fields defaults, or name an object") from None
    if not all(callable(getattr(task, part, None)) for part in ("examples", "score")) or not (
        dataclasses.is_dataclass(task) and isinstance(getattr(task, "name", None), str)
    ):
        raise ValueError(f"{text}: not a task; give a dataclass with a name, examples(form) and score(answer, example)")
    return cast(Task, task)


def make_task(
    name: str, inputs: Inputs, window: int
) -> NeedleInAHaystack | ruler.RulerTask | longbench.LongBench | GSM8K | MathProblems | MultiQuery:
    """The task of that name.

    Args:
        window: length of the model's context window in tokens. LongBench's prompts are truncated to it, less room for the answer and the
            chat template.

    Raises:
        ValueError: the name is unknown, or an input that the task needs is not given.
    """
    name = task_name(name)
    if name.startswith("needle-") and name.removeprefix("needle-") in get_args(Kind):
        return NeedleInAHaystack(
            lengths=inputs.lengths or (1024, 2048, 4096),
            depths=inputs.depths,
            kind=cast(Kind, name.removeprefix("needle-")),
            samples=inputs.samples or 1,
            text=inputs.read_text(),
            seed=inputs.seed,
        )
    if name in ruler.TASKS:
        file = inputs.file("data", "file of questions") if name.startswith("qa") else None
        return ruler.ruler(
            name, inputs.length(4096), inputs.samples or 20, inputs.seed, text=inputs.read_text(), file=file
        )
    if name.startswith("longbench-") and name.removeprefix("longbench-") in longbench.tasks():
        task, path = name.removeprefix("longbench-"), Path(inputs.file("data", "LongBench file or folder"))
        return longbench.LongBench(
            task,
            str(path / f"{task}.jsonl" if path.is_dir() else path),
            max_length=inputs.length(window - _TEMPLATE - longbench.tasks()[task]["max_new_tokens"]),
            samples=inputs.samples,
        )
    if name == "gsm8k":
        problems = inputs.file("data", "file of problems")
        solved = inputs.file("examples", "file of solved examples") if inputs.shots else None
        return GSM8K(
            problems,
            solved,
            shots=inputs.shots,
            samples=inputs.samples,
            seed=inputs.seed,
            max_new_tokens=inputs.max_new_tokens,
        )
    if name in get_args(Benchmark):
        problems = inputs.file("data", "file of problems")
        return MathProblems(problems, cast(Benchmark, name), inputs.samples, inputs.max_new_tokens)
    if name == "multi-query":
        return MultiQuery(
            inputs.file("data", "file of contexts and questions"),
            inputs.history,
            inputs.score_by,
            inputs.samples,
            **({} if inputs.max_new_tokens is None else {"max_new_tokens": inputs.max_new_tokens}),
        )
    raise ValueError(f"{name} is measured on a text; it has no examples")
