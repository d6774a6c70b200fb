"""Tasks by name, from the few things that a user gives: lengths, samples, a seed, files."""

import dataclasses
from pathlib import Path
from typing import cast, get_args

from kvjax._util.suggestions import hint, same
from kvjax._util.texts import read_text

from . import longbench, ruler
from .gsm8k import GSM8K
from .math_problems import Benchmark, MathProblems
from .multi_query import MultiQuery, ScoreBy
from .needle import Kind, NeedleInAHaystack
from .task import History

MEASURES = ("perplexity", "fidelity")
"""What is measured on a text, with no answers to score."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What tasks are made from; each takes what it knows of.

    Attributes:
        lengths: tokens of prompt and answer, or of the text that is read; None: the task's own. Only needles take several.
        samples: examples, of a needle task for each length and depth; None: 1 of needles, 20 of RULER, else all there are.
        seed: of what is drawn.
        depths: of needles, as shares of the haystack.
        text: a plain text: haystack, or what perplexity and fidelity are measured on.
        data: LongBench's jsonl file or the folder of them, problems of GSM8K, MATH-500 or AIME, contexts with many questions, or the
            questions of RULER's QA tasks.
        examples: GSM8K's solved examples.
        shots: how many of them; with none of them GSM8K is asked of a model that reasons.
        window, stride: perplexity in windows of so many tokens, that begin so far from one another, in place of streaming.
        queries: tokens at the text's end that fidelity compares the attention of.
        max_new_tokens: of an answer to problems of mathematics and to questions of one context; None: the task's own.
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
        """The one length that most tasks take.

        Raises:
            ValueError: there are several.
        """
        if self.lengths is not None and len(self.lengths) != 1:
            raise ValueError(f"lengths {self.lengths}: only needle tasks take several; give one")
        return default if self.lengths is None else self.lengths[0]

    def read_text(self) -> str | None:
        """The text, if one is given."""
        return None if self.text is None else read_text(self.text)

    def file(self, field: str, what: str) -> str:
        """The path that `field` holds.

        Raises:
            ValueError: there is none.
        """
        path: Path | None = getattr(self, field)
        if path is None:
            raise ValueError(f"no {what}; give it as --{field} FILE")
        return str(path)


def task_names() -> tuple[str, ...]:
    """All names that `make_task` knows, and the `MEASURES`."""
    needles = (f"needle-{kind}" for kind in get_args(Kind))
    named = (f"longbench-{name}" for name in longbench.tasks())
    return (*MEASURES, *needles, *ruler.TASKS, *named, "gsm8k", *get_args(Benchmark), "multi-query")


def task_name(asked: str) -> str:
    """The one of `task_names` that is asked for, of which only letters and digits matter, and not their case.

    Raises:
        ValueError: there is none such; the message names all, and the nearest.
    """
    found = same(asked, task_names())
    if found is None:
        raise ValueError(f"unknown task {asked!r}; there are {', '.join(task_names())}.{hint(asked, task_names())}")
    return found


def make_task(
    name: str, inputs: Inputs, window: int
) -> NeedleInAHaystack | ruler.RulerTask | longbench.LongBench | GSM8K | MathProblems | MultiQuery:
    """The task of that name.

    Args:
        window: tokens that the model was trained on, which prompts of LongBench are cut to.

    Raises:
        ValueError: the name is unknown, or something that the task needs is not given.
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
            max_length=inputs.length(window - longbench.tasks()[task]["max_new_tokens"]),
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
