"""What the sections measure with: a model, texts and threads; and the measurements that several sections share."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvjax
from kvjax.evals import NeedleInAHaystack, Task, evaluate
from reproduction import models
from reproduction.analyses.continuation import continuation
from reproduction.equal_bytes.cells import Maker

from .claim import FULL as FULL
from .claim import Row

T = TypeVar("T")

TOGETHER = 11
"""Needles in one batch; all of them at once would not fit on every device."""


class OutOfTime(Exception):
    """The time limit of a run is over before everything is measured."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model and texts.

    Attributes:
        books: plain text files; each gives one sample.
        reference: a text for calibration that is not one of the books.
        small: use small sizes, to test on a CPU that everything runs. Their results mean nothing.
        threads: programs that are compiled and run at a time.
        data: folder with `longbench/*.jsonl`, `gsm8k/test.jsonl` and `gsm8k/train_first600.jsonl`.
        kept: results of the jobs that an earlier run finished, by name.
        keep: called with the name and result of each finished job.
        in_time: whether another job may start.
        profiles: folder of profiles of models for which kvjax has none.
    """

    params: kvjax.Params
    books: Sequence[Path]
    reference: Path
    small: bool
    threads: int
    data: Path = Path("shared/data/tasks")
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep: Callable[[str, Any], None] = lambda name, result: None
    in_time: Callable[[], bool] = lambda: True
    profiles: Path = Path(__file__).parents[1] / "profiles"

    def profiled(self, methods: Mapping[str, kvjax.Policy]) -> dict[str, kvjax.Policy]:
        """The full cache and these methods, with profiles of the model's heads where they need them."""
        make = Maker(self.params.config, self.profiles)
        return {FULL: kvjax.Full(), **{name: make(policy) for name, policy in methods.items()}}

    def pieces(self, count: int, length: int, skip: int) -> list[list[int]]:
        """From each of the first `count` books, `length` tokens after the first `skip`.

        Raises:
            ValueError: there are fewer books.
            SystemExit: a book is too short.
        """
        if len(self.books) < count:
            raise ValueError(f"{len(self.books)} books, where {count} are read; give more")
        return [models.read_tokens(self.params, book, length, skip) for book in self.books[:count]]

    def haystack(self, length: int, depths: int, samples: int) -> NeedleInAHaystack:
        """A needle at evenly spaced depths of the first book, `samples` times each."""
        spaced = tuple(i / (depths - 1) for i in range(depths))
        text = self.books[0].read_text(encoding="utf-8")
        return NeedleInAHaystack(lengths=(length,), depths=spaced, samples=samples, text=text)

    def each(self, jobs: Mapping[str, Callable[[], T]], of: str = "") -> dict[str, T]:
        """Results of all jobs, by name. Prints a line, which begins with `of`, for each finished job.

        Results are values that JSON can hold. Each is written when it is there, so an interrupted run continues.

        Raises:
            OutOfTime: the time is over and a job is left.
        """

        def run(name: str) -> T:
            if of + name in self.kept:
                return self.kept[of + name]
            if not self.in_time():
                raise OutOfTime
            start = time.perf_counter()
            found = jobs[name]()
            self.keep(of + name, found)
            line = f"  {of}{name:50s} {time.perf_counter() - start:6.1f} s\n"
            print(line, end="", flush=True)  # whole, as other threads print too
            return found

        with ThreadPoolExecutor(self.threads) as pool:
            return dict(zip(jobs, pool.map(run, jobs), strict=True))


def continued(
    bench: Bench, methods: Mapping[str, kvjax.Policy], texts: Sequence[Sequence[int]], prompt: int, at: str
) -> list[Row]:
    """Perplexity of what follows prompts, agreement with the full cache, and bytes held, of all methods and FULL."""
    policies = bench.profiled(methods)
    found = bench.each({name: partial(_read_on, bench, texts, prompt, policy) for name, policy in policies.items()})
    rows, full = [], found[FULL]["predicted"]
    for name, mine in found.items():
        agreed = [float(np.mean(np.equal(a, b))) for a, b in zip(mine["predicted"], full, strict=True)]
        rows += [
            Row("perplexity", name, at, mine["perplexity"]),
            Row("agreement", name, at, agreed),
            Row("cache in MB", name, at, mine["megabytes"]),
        ]
    return rows


def _read_on(bench: Bench, texts: Sequence[Sequence[int]], prompt: int, policy: kvjax.Policy) -> dict[str, Any]:
    """What one method makes of what follows prompts."""
    found = continuation(bench.params, texts, prompt, policy)
    return {
        "perplexity": [text.scores.perplexity for text in found],
        "megabytes": [text.scores.cache_bytes / 1e6 for text in found],
        "predicted": [np.asarray(text.predicted).tolist() for text in found],
    }


def needles(bench: Bench, methods: Mapping[str, kvjax.Policy], task: NeedleInAHaystack, at: str) -> list[Row]:
    """Needles found, of all methods and FULL. Policies see the question, as in the papers."""
    examples = len(task.lengths) * len(task.depths) * task.samples
    return scored(bench, methods, {"needle": task}, "needle accuracy", at, min(examples, TOGETHER))


def scored(
    bench: Bench, methods: Mapping[str, kvjax.Policy], tasks: Mapping[str, Task], measure: str, at: str, batch: int = 8
) -> list[Row]:
    """Scores of tasks, one after the other, of all methods and FULL. Policies see the question, as in the papers."""
    policies = bench.profiled(methods)
    jobs = {
        f"{name}, {title}": partial(_scores, bench, task, policy, batch)
        for title, task in tasks.items()
        for name, policy in policies.items()
    }
    found = bench.each(jobs, f"{at}: ")
    return [
        Row(measure, name, at, [score for title in tasks for score in found[f"{name}, {title}"]]) for name in policies
    ]


def _scores(bench: Bench, task: Task, policy: kvjax.Policy, batch: int) -> list[float]:
    """Of every example."""
    rows = evaluate(bench.params, task, policy, query_aware=True, batch=batch).rows
    return [float(row["score"]) for row in rows]
