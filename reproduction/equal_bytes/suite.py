"""Tasks with prompts of similar length, so that they share one compiled program for each policy and budget."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvjax.cache import bucket
from kvjax.evals import Example, Format, Task
from kvjax.evals.longbench import tasks as longbench_tasks
from kvjax.evals.ruler import TASKS
from kvjax.evals.tasks import Inputs, make_task

LONGBENCH = ("multi_news", "multifieldqa_zh", "passage_retrieval_zh")
"""LongBench's tasks that the page has."""

STRATA = 4
"""Lengths of prompts that stand for all of a suite's."""

GRAIN = 128
"""Tokens that these lengths are multiples of."""

TEMPLATE = 64
"""Tokens left free for the chat template around a prompt that LongBench cuts."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Data files of tasks.

    Attributes:
        text: a book, in which RULER hides needles.
        folder: has `longbench/*.jsonl`, `gsm8k/test.jsonl` and `gsm8k/train_first600.jsonl`.
        questions: files of RULER's qa_1 (SQuAD 2) and qa_2 (HotpotQA), by task; tasks without a file are excluded.
    """

    text: Path
    folder: Path
    questions: dict[str, Path]


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """One task's examples as tokens.

    Attributes:
        task: what scores answers.
        examples: all that there are.
        pairs: of each the context's tokens, and those of what follows it.
    """

    task: Task
    examples: Sequence[Example]
    pairs: Sequence[tuple[list[int], list[int]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Suite:
    """Tasks that share programs.

    Attributes:
        name: what is asked and how long it is, such as "ruler-4096".
        tasks: their names, as results have them.
        inputs: what each is made from.
        prompt: tokens that prompts, questions included, have at most.
        form: how examples become tokens.
        window: tokens that the model was trained on.
    """

    name: str
    inputs: dict[str, Inputs]
    prompt: int
    form: Format
    window: int

    @property
    def tasks(self) -> Sequence[str]:
        """Names, in order."""
        return tuple(self.inputs)

    @cached_property
    def asked(self) -> dict[str, Asked]:
        """Every task's examples; made once, which takes a while for long prompts."""
        found = {}
        for name, inputs in self.inputs.items():
            task = make_task(name, inputs, self.window)
            examples = task.examples(self.form)
            found[name] = Asked(task, examples, [self.form.encode(example) for example in examples])
        return found

    @cached_property
    def question(self) -> int:
        """Tokens, padding included, of the longest question."""
        return bucket(max(question for _, question, _ in self._sizes))

    def new(self, seen: bool) -> int:
        """Room for the longest answer, and for the question before it unless that is seen as part of the prompt; padding included."""
        return bucket(max(answer if seen else question + answer for _, question, answer in self._sizes))

    def longest(self, seen: bool) -> int:
        """Tokens of the longest prompt, the question among them if it is seen."""
        return max(context + question if seen else context for context, question, _ in self._sizes)

    def prompt_share(self, seen: bool) -> float:
        """Share of all tokens of a row that belong to its prompt, the question among them if it is seen: the mean over rows."""
        shares = [
            (context + question * seen) / (context + question + answer) for context, question, answer in self._sizes
        ]
        return sum(shares) / len(shares)

    def lengths(self, seen: bool) -> tuple[int, ...]:
        """Tokens of prompts that stand for all of them: the middles of `STRATA` equal parts of their sorted lengths, rounded up.

        A row's bytes are about linear in its length, so these tell the mean over all rows.
        """
        found = sorted(context + question if seen else context for context, question, _ in self._sizes)
        middles = [found[(2 * i + 1) * len(found) // (2 * STRATA)] for i in range(STRATA)]
        return tuple(-(-length // GRAIN) * GRAIN for length in middles)

    @property
    def shortest(self) -> int:
        """Tokens that the row which reaches the fewest has in all."""
        return min(map(sum, self._sizes))

    @cached_property
    def _sizes(self) -> list[tuple[int, int, int]]:
        """Of every example, tokens of the context and of the question, and the most of its answer."""
        return [
            (len(context), len(question), example.max_new_tokens)
            for asked in self.asked.values()
            for example, (context, question) in zip(asked.examples, asked.pairs, strict=True)
        ]

    def only(self, names: Sequence[str]) -> "Suite | None":
        """With these of its tasks alone; None if it has none of them."""
        inputs = {name: given for name, given in self.inputs.items() if name in names}
        return dataclasses.replace(self, inputs=inputs) if inputs else None

    @property
    def settings(self) -> dict[str, Any]:
        """What makes its examples, programs and budgets what they are; paths by their names alone.

        The lengths that budgets are for are those of the samples at hand: more of a task whose prompts differ in length are another run.
        """
        tasks = {name: _named(inputs) for name, inputs in self.inputs.items()}
        sizes = {"unseen": [self.lengths(False), self.new(False)], "seen": [self.lengths(True), self.new(True)]}
        return {"prompt": self.prompt, "question": self.question, "sizes": sizes, "tasks": tasks}


def _named(inputs: Inputs) -> dict[str, Any]:
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(Inputs)}
    asked = {name: value.name if isinstance(value, Path) else value for name, value in fields.items()}
    plain = {field.name: field.default for field in dataclasses.fields(Inputs)}
    return {name: value for name, value in asked.items() if value != plain[name] and name != "samples"}


def make_suites(names: Sequence[str], form: Format, window: int, samples: int, seed: int, data: Data) -> list[Suite]:
    """Suites by name: ruler-LENGTH, longbench-LENGTH (one for each task, as their answers' lengths differ), gsm8k-SHOTS.

    Raises:
        SystemExit: a name is none of these.
    """
    found = []
    for name in names:
        kind, _, number = name.partition("-")
        if kind not in ("ruler", "longbench", "gsm8k") or not number.isdecimal():
            raise SystemExit(f"no suite {name}; there are ruler-LENGTH, longbench-LENGTH and gsm8k-SHOTS")
        size = int(number)
        if kind == "ruler":
            tasks = [task for task in TASKS if not task.startswith("qa_") or task in data.questions]
            inputs = {
                task: Inputs((size,), text=data.text, data=data.questions.get(task), samples=samples, seed=seed)
                for task in tasks
            }
            found.append(Suite(name, inputs, size, form, window))
        elif kind == "longbench":
            folder = data.folder / "longbench"
            for task in LONGBENCH:
                cut = Inputs(
                    (size - TEMPLATE - longbench_tasks()[task]["max_new_tokens"],),
                    data=folder,
                    samples=samples,
                    seed=seed,
                )
                found.append(Suite(f"{name}-{task}", {f"longbench-{task}": cut}, size, form, window))
        else:
            problems, solved = data.folder / "gsm8k/test.jsonl", data.folder / "gsm8k/train_first600.jsonl"
            inputs = Inputs(shots=size, data=problems, examples=solved, samples=samples, seed=seed)
            suite = Suite(name, {"gsm8k": inputs}, 0, form, window)
            longest = max(len(context) + len(question) for context, question in suite.asked["gsm8k"].pairs)
            found.append(dataclasses.replace(suite, prompt=bucket(longest)))
    return found
