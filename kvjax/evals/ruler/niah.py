"""RULER's eight needle tasks (Hsieh et al. 2024, section 3.1 and Table 2): keys with values, hidden in noise, text or other needles."""

import dataclasses
import random
from collections.abc import Callable
from typing import Literal

from kvjax.evals import haystack
from kvjax.evals.lengths import largest
from kvjax.evals.task import Example, Format

from .base import RulerTask, distinct
from .vocabulary import category

Hay = Literal["noise", "text", "needles"]
What = Literal["words", "numbers", "uuids"]

_CONTEXT = (
    "{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {what} afterwards.\n{hay}\n"
)
_QUESTION = "What {are} the special magic {what} for {keys} mentioned in the provided text?"
_PREFIX = " The special magic {what} for {keys} mentioned in the provided text {are}"
_NEEDLE = "One of the special magic {what} for {key} is: {value}."
_DEPTHS = 40
"""Number of depths for needles in a text, evenly spaced, from its beginning to its end."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the eight tasks.

    Attributes:
        hay: noise (one line, repeated), a text, or distracting needles.
        key, value: types of keys and values.
        keys, values, queries: number of keys hidden, of values per key, and of keys in the question.
    """

    hay: Hay
    key: What = "words"
    value: What = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


SETTINGS = {
    "niah_single_1": Setting("noise"),
    "niah_single_2": Setting("text"),
    "niah_single_3": Setting("text", value="uuids"),
    "niah_multikey_1": Setting("text", keys=4),
    "niah_multikey_2": Setting("needles"),
    "niah_multikey_3": Setting("needles", key="uuids", value="uuids"),
    "niah_multivalue": Setting("text", values=4),
    "niah_multiquery": Setting("text", keys=4, queries=4),
}


def _word(rng: random.Random) -> str:
    return f"{rng.choice(category('adjective'))}-{rng.choice(category('noun'))}"


_DRAW: dict[What, Callable[[random.Random], str]] = {
    "words": _word,
    "numbers": haystack.number,
    "uuids": haystack.identifier,
}


@dataclasses.dataclass(frozen=True)
class Niah(RulerTask):
    """A needle task.

    Attributes:
        task: its name, a key of `SETTINGS`.
        text: haystack of the tasks that hide needles in a text (Paul Graham's essays in the paper). It is repeated if it is too
            short.

    Example:
        >>> task = kvjax.evals.ruler.Niah(length=2048, samples=2, task="niah_single_1")
        >>> example = task.examples(kvjax.evals.Format(chat.tokenizer))[0]
        >>> task.score(f"It is {example.answers[0]}.", example)
        1.0
    """

    task: str = "niah_single_1"
    text: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in SETTINGS:
            raise ValueError(f"task={self.task!r}; give one of {', '.join(SETTINGS)}")
        if SETTINGS[self.task].hay == "text" and self.text is None:
            raise ValueError(f"{self.task} hides its needles in a text; give one as text (--text FILE)")

    def check(self) -> None:
        """Raise ImportError if keys or values are words and the vocabulary is not installed."""
        if "words" in (SETTINGS[self.task].key, SETTINGS[self.task].value):
            category("noun")
        if self.text is not None:
            haystack.sentences(self.text)

    @property
    def name(self) -> str:
        """RULER's name of the task."""
        return self.task

    def example(self, form: Format, index: int, seed: int) -> Example:
        """Keys and values, needles in a haystack that fills the length, and a question about some keys."""
        setting, rng = SETTINGS[self.task], random.Random(seed)
        keys = distinct(_DRAW[setting.key], rng, setting.keys)
        values = {key: distinct(_DRAW[setting.value], rng, setting.values) for key in keys}
        needles = [_NEEDLE.format(what=setting.value, key=key, value=v) for key in keys for v in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, setting.queries)
        one = setting.queries * setting.values == 1
        words = {
            "some": "A" if one else "Some",
            "are": "is" if one else "are",
            "what": setting.value.removesuffix("s") if one else setting.value,
            "keys": ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0],
        }
        depths = sorted(place / (_DEPTHS - 1) for place in rng.sample(range(_DEPTHS), len(needles)))
        others = random.Random(rng.getrandbits(64)).getrandbits(64)
        behind = random.Random(others + 1).random()

        def build(count: int) -> Example:
            hay, separator = self._hay(setting, count, others)
            # In noise and among needles, the needle is before a random unit, and never the last one.
            at = depths if setting.hay == "text" else [int(behind * count) / count]
            question = _QUESTION.format(**words | {"are": words["are"] if one else "are all"})
            return Example(
                context=_CONTEXT.format(**words, hay=haystack.hide(hay, needles, at, separator)),
                question=question,
                answers=tuple(value for key in asked for value in values[key]),
                max_new_tokens=128,
                prefix=_PREFIX.format(**words),
            )

        return largest(build, form, self.length, min_units=1)

    def _hay(self, setting: Setting, count: int, seed: int) -> tuple[list[str], str]:
        """`count` units of hay, and the separator between them."""
        if setting.hay == "text":
            assert self.text is not None
            return haystack.repeated(haystack.sentences(self.text), count), " "
        if setting.hay == "noise":
            return [haystack.NOISE] * count, "\n"
        rng, what = random.Random(seed), setting.value
        return [
            _NEEDLE.format(what=what, key=_DRAW[setting.key](rng), value=_DRAW[what](rng)) for _ in range(count)
        ], "\n"
