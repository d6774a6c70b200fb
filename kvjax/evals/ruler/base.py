"""What RULER's tasks share: a length, a number of samples, a seed."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvjax.evals.haystack import seeded
from kvjax.evals.task import Example, Format

from .scoring import match_all


@dataclasses.dataclass(frozen=True)
class RulerTask:
    """Base of RULER's tasks; subclasses draw one example.

    Attributes:
        length: maximum number of tokens of prompt and longest answer, by the model's tokenizer. Examples have as many units (sentences, words,
            documents) as fit.
        samples: number of examples, drawn independently (500 in the paper).
        seed: random seed; draws also depend on the length and the example's index.

    Example:
        >>> isinstance(kvjax.evals.ruler.VariableTracking(length=4096), kvjax.evals.ruler.RulerTask)
        True
    """

    kind: ClassVar[str]

    length: int = 4096
    samples: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.samples < 1:
            raise ValueError(f"length={self.length}, samples={self.samples}; give 1 or more of each")

    def check(self) -> None:
        """Raise ImportError if a package that the task needs is not installed."""

    @property
    def name(self) -> str:
        """RULER's name of the task."""
        return self.kind

    def examples(self, form: Format) -> Sequence[Example]:
        """All examples.

        Raises:
            ValueError: the length is too short for the task.
        """
        drawn = [
            self.example(form, i, seeded(self.name, self.seed, self.length, i).getrandbits(64))
            for i in range(self.samples)
        ]
        return [dataclasses.replace(example, labels={"length": self.length}) for example in drawn]

    def example(self, form: Format, index: int, seed: int) -> Example:
        """Example `index`, drawn by generators seeded with `seed`."""
        raise NotImplementedError

    def score(self, answer: str, example: Example) -> float:
        """Share of the references in the answer."""
        return match_all(answer, example.answers)


def distinct(draw: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    """`count` distinct draws."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
