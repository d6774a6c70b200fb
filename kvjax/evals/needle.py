"""Needle in a haystack: one sentence hidden at some depth of a text, and a question that only this sentence answers.

The grid of lengths and depths is Kamradt's (2023, "Needle In A Haystack: Pressure Testing LLMs"). The kinds of needle are his
sentence, the passkey of Mohtashami and Jaggi (2023, "Landmark Attention"), and numbers and UUIDs as in RULER.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from . import haystack
from .lengths import largest
from .task import Example, Format

Kind = Literal["number", "uuid", "passkey", "sentence"]


class Needle(NamedTuple):
    """A sentence to hide, and the question about it."""

    sentence: str
    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class NeedleInAHaystack:
    """A grid of lengths × depths.

    Attributes:
        lengths: tokens of prompt and answer.
        depths: fractions of the haystack before the needle.
        kind: "number" (seven digits), "uuid", "passkey" (five digits, stated twice) or "sentence" (Kamradt's sandwich in Dolores
            Park).
        samples: number of examples for each length and depth, with different needles and parts of the haystack.
        text: haystack; None repeats the passkey task's noise.
        begin: whether the model is given the beginning of the answer; without it, models restate the question first.
        seed: random seed of needles and of the haystack's position in the text.

    Example:
        >>> task = kvjax.evals.NeedleInAHaystack(lengths=(254,), depths=(0.0, 1.0))
        >>> examples = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> len(examples), examples[0].labels, task.score(f"It is {examples[0].answers[0]}.", examples[0])
        (2, {'length': 254, 'depth': 0.0, 'kind': 'number'}, 1.0)
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    kind: Kind = "number"
    samples: int = 1
    text: str | None = dataclasses.field(default=None, repr=False)
    begin: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}; give one of {', '.join(get_args(Kind))}")
        if not self.lengths or not self.depths or self.samples < 1:
            raise ValueError(
                f"lengths={self.lengths}, depths={self.depths}, samples={self.samples}; give one or more of each"
            )
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths}; give shares from 0 to 1")

    def check(self) -> None:
        """Raise ValueError if the haystack is empty."""
        self._hay()

    @property
    def name(self) -> str:
        """needle-KIND."""
        return f"needle-{self.kind}"

    def examples(self, form: Format) -> Sequence[Example]:
        """One for every length, depth and sample.

        Raises:
            ValueError: a length is too short for needle and question.
        """
        grid = [(length, depth, i) for length in self.lengths for depth in self.depths for i in range(self.samples)]
        return [self._example(form, *cell) for cell in grid]

    def score(self, answer: str, example: Example) -> float:
        """Share of the needle's facts in the answer, ignoring case."""
        return sum(fact.lower() in answer.lower() for fact in example.answers) / len(example.answers)

    def _hay(self) -> tuple[str, ...]:
        return haystack.sentences(haystack.NOISE if self.text is None else self.text)

    def _example(self, form: Format, length: int, depth: float, sample: int) -> Example:
        rng = haystack.seeded(self.name, self.seed, length, depth, sample)
        needle = make_needle(self.kind, rng)
        hay = self._hay()
        start = 0 if self.text is None else rng.randrange(len(hay))
        hay = hay[start:] + hay[:start]

        def build(count: int) -> Example:
            text = haystack.hide(haystack.repeated(hay, count), [needle.sentence], [depth], " ")
            return Example(
                context=f"Some important information is hidden in the following text. Find it and memorize it.\n\n{text}\n\n",
                question=needle.question,
                answers=needle.answers,
                max_new_tokens=24 if self.begin else 40,
                prefix=needle.prefix if self.begin else "",
                labels={"length": length, "depth": depth, "kind": self.kind},
            )

        return largest(build, form, length, min_units=1)


def make_needle(kind: Kind, rng: random.Random) -> Needle:
    """A needle of a kind; all but the "sentence" are random."""
    if kind == "sentence":
        return Needle(
            "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
            "What is the best thing to do in San Francisco?",
            " The best thing to do in San Francisco is",
            ("eat a sandwich", "Dolores Park", "sunny day"),
        )
    if kind == "passkey":
        value = haystack.number(rng, 5)
        sentence = f"The pass key is {value}. Remember it. {value} is the pass key."
        return Needle(sentence, "What is the pass key?", " The pass key is", (value,))
    value = haystack.number(rng) if kind == "number" else haystack.identifier(rng)
    what = "magic number" if kind == "number" else "magic code"
    return Needle(
        f"The special {what} is: {value}.", f"What is the special {what}?", f" The special {what} is:", (value,)
    )
