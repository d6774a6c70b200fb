"""What sections measure with: a model, texts, and threads; and the two measurements that several of them share."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import kvjax
from benchmarks.analyses.continuation import continuation
from kvjax.evals import NeedleInAHaystack, evaluate

from .claim import Row

T = TypeVar("T")

CHARACTERS = 8
"""Of a text, for each token wanted, are tokenised: about twice as many as a token has."""

FULL = "full"
"""What rows call the full cache."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model and texts.

    Attributes:
        books: plain text files, each of which gives one sample.
        reference: a text to calibrate on, none of the books.
        small: sizes that a CPU copes with, to try whether everything runs; nothing is to be concluded from them.
        threads: programs that are compiled and run at a time.
    """

    params: kvjax.Params
    books: Sequence[Path]
    reference: Path
    small: bool
    threads: int

    def pieces(self, count: int, length: int, skip: int) -> list[list[int]]:
        """From each of the first `count` books, `length` tokens after the first `skip`.

        Raises:
            ValueError: there are fewer books, or one is too short.
        """
        if len(self.books) < count:
            raise ValueError(f"{len(self.books)} books, where {count} are read; give more")
        found = []
        for book in self.books[:count]:
            beginning = book.read_text(encoding="utf-8")[: CHARACTERS * (skip + length)]
            tokens = self.params.tokenizer.encode(beginning)[skip : skip + length]
            if len(tokens) < length:
                raise ValueError(f"{book} begins with fewer than {skip + length} tokens; give a longer one")
            found.append(tokens)
        return found

    def each(self, jobs: Mapping[str, Callable[[], T]], of: str = "") -> dict[str, T]:
        """Results of all jobs, by name; a line on the terminal for each that is done, which begins with `of`."""

        def run(name: str) -> T:
            start = time.perf_counter()
            found = jobs[name]()
            line = f"  {of}{name:50s} {time.perf_counter() - start:6.1f} s\n"
            print(line, end="", flush=True)  # whole, as other threads print too
            return found

        with ThreadPoolExecutor(self.threads) as pool:
            return dict(zip(jobs, pool.map(run, jobs), strict=True))


def continued(
    bench: Bench, methods: Mapping[str, kvjax.Policy], texts: Sequence[Sequence[int]], prompt: int, at: str
) -> list[Row]:
    """Perplexity of what follows prompts, agreement with the full cache, and bytes held, of all methods and FULL."""
    policies = {FULL: kvjax.Full(), **methods}
    found = bench.each(
        {
            name: lambda policy=policy: continuation(bench.params, texts, prompt, policy)
            for name, policy in policies.items()
        }
    )
    rows, full = [], found[FULL]
    for name, mine in found.items():
        rows += [
            Row("perplexity", name, at, [text.scores.perplexity for text in mine]),
            Row("agreement", name, at, [text.agreement(other) for text, other in zip(mine, full, strict=True)]),
            Row("cache in MB", name, at, [text.scores.cache_bytes / 1e6 for text in mine]),
        ]
    return rows


def needles(bench: Bench, methods: Mapping[str, kvjax.Policy], task: NeedleInAHaystack, at: str) -> list[Row]:
    """Needles found, of all methods and FULL. Policies see the question, as in the papers."""
    policies = {FULL: kvjax.Full(), **methods}
    batch = len(task.lengths) * len(task.depths) * task.samples
    found = bench.each(
        {
            name: lambda policy=policy: evaluate(bench.params, task, policy, query_aware=True, batch=batch)
            for name, policy in policies.items()
        }
    )
    return [
        Row("needle accuracy", name, at, [float(row["score"]) for row in evaluation.rows])
        for name, evaluation in found.items()
    ]
