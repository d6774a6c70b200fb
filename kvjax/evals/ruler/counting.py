"""RULER's aggregation tasks (Hsieh et al. 2024, section 3.3): the most common words of a list, or of coded text."""

import dataclasses
import math
import random
import string
from typing import ClassVar

from kvjax.evals.lengths import largest
from kvjax.evals.task import Example, Format

from .base import RulerTask, distinct
from .vocabulary import all_words


@dataclasses.dataclass(frozen=True)
class CommonWords(RulerTask):
    """A numbered list in which ten words are frequent and the others rare, after one short, solved list.

    Longer lists have more rare words. Once the list contains the whole vocabulary, all words are repeated more often, in the same
    proportion.

    Attributes:
        common: number of words to find.
        common_times, uncommon_times: how often those and the others come; None takes the published 30 and 3, and 6 and 1 below
            4096 tokens.

    Example:
        >>> task = kvjax.evals.ruler.CommonWords(length=8192, samples=1)
        >>> (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> len(example.answers)
        10
    """

    kind: ClassVar[str] = "cwe"

    common: int = 10
    common_times: int | None = None
    uncommon_times: int | None = None

    def check(self) -> None:
        """Raise ImportError if the vocabulary is not installed."""
        all_words()

    def example(self, form: Format, index: int, seed: int) -> Example:
        """A list of the maximum length that fits."""
        short = self.length < 4096
        common_times = (6 if short else 30) if self.common_times is None else self.common_times
        uncommon_times = (1 if short else 3) if self.uncommon_times is None else self.uncommon_times
        words = len(all_words())
        shown = self._problem(random.Random(seed), *((20, 3, 1) if short else (40, 10, 3)))
        answer = " ".join(f"{i}. {word}" for i, word in enumerate(shown.answers, 1))
        solved = f"{shown.context}{shown.question}{shown.prefix} {answer}\n"

        def build(count: int) -> Example:
            drawn, times = min(count, words), -(-count // words)
            problem = self._problem(random.Random(seed + 1), drawn, times * common_times, times * uncommon_times)
            return dataclasses.replace(problem, context=solved + problem.context)

        return largest(build, form, self.length, min_units=self.common + 1)

    def _problem(self, rng: random.Random, count: int, common_times: int, uncommon_times: int) -> Example:
        words = rng.sample(all_words(), count)
        listed = words[: self.common] * common_times + words[self.common :] * uncommon_times
        rng.shuffle(listed)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        return Example(
            context="Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{numbered}\n",
            question=f"Question: What are the {self.common} most common words in the above list?",
            answers=tuple(words[: self.common]),
            max_new_tokens=120,
            prefix=f" Answer: The top {self.common} words that appear most often in the list are:",
        )


@dataclasses.dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Random words whose counts fall as a power of their rank. The answer is ranks 2 to 4; rank 1 is "...".

    Attributes:
        alpha: the exponent, above 1.
        letters: letters of a coded word.

    Example:
        >>> task = kvjax.evals.ruler.FrequentWords(length=4096, samples=1)
        >>> (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> len(example.answers)
        3
    """

    kind: ClassVar[str] = "fwe"

    alpha: float = 2.0
    letters: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}; give more than 1, or the counts have no finite sum")

    def example(self, form: Format, index: int, seed: int) -> Example:
        """Of n words, rank k appears ⌊n k^-alpha / zeta(alpha)⌋ times."""
        rng = random.Random(seed)
        vocabulary = ["...", *distinct(self._word, rng, max(self.length // 50, 3))]
        order, total = rng.getrandbits(64), zeta(self.alpha)

        def build(count: int) -> Example:
            times = [math.floor(count * rank**-self.alpha / total) for rank in range(1, len(vocabulary) + 1)]
            words = [word for word, n in zip(vocabulary, times, strict=True) for _ in range(n)]
            random.Random(order).shuffle(words)
            return Example(
                context="Read the following coded text and track the frequency of each coded word. Find the three most "
                f"frequently appeared coded words. {' '.join(words)}\n",
                question="Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                "frequently appeared words in the above coded text?",
                answers=tuple(vocabulary[1:4]),
                max_new_tokens=50,
                prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            )

        # With fewer words, rank 4 would not appear at all.
        return largest(build, form, self.length, min_units=math.ceil(total * 4**self.alpha))

    def _word(self, rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=self.letters))


def zeta(s: float) -> float:
    """Riemann's zeta function for s > 1: its first terms, and the Euler-Maclaurin estimate of the rest."""
    n = 1000
    return sum(k**-s for k in range(1, n)) + n ** (1 - s) / (s - 1) + n**-s / 2 + s * n ** (-s - 1) / 12
