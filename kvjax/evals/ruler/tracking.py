"""RULER's variable tracking (Hsieh et al. 2024, section 3.2): all variables that a chain of assignments gives the same value."""

import dataclasses
import itertools
import random
import string
from typing import ClassVar

from kvjax.evals import haystack
from kvjax.evals.lengths import largest
from kvjax.evals.task import Example, Format

from .base import RulerTask, distinct

_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{hay}\n"
_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (  # "assgined" as published
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the value"
    " {value}, they are: "
)
_SHOWN_NOISE = 10
"""Lines of noise in the solved example."""


@dataclasses.dataclass(frozen=True)
class VariableTracking(RulerTask):
    """Chains X1 = V, X2 = X1, … in noise, after one solved example. The answer is all variables of the first chain.

    Attributes:
        chains: number of chains.
        hops: assignments of a chain after its first.

    Example:
        >>> task = kvjax.evals.ruler.VariableTracking(length=4096, samples=1, hops=2)
        >>> (example,) = task.examples(kvjax.evals.Format(chat.tokenizer))
        >>> len(example.answers)  # variables of a chain
        3
    """

    kind: ClassVar[str] = "vt"

    chains: int = 1
    hops: int = 4

    def example(self, form: Format, index: int, seed: int) -> Example:
        """A solved example with variables of three letters, then the problem, with five letters, in as much noise as fits."""
        shown = self._problem(random.Random(seed), 3, _SHOWN_NOISE)
        solved = f"{shown.context}{shown.question}{shown.prefix}{' '.join(shown.answers)}\n\n"

        def build(count: int) -> Example:
            problem = self._problem(random.Random(seed + 1), 5, count)
            return dataclasses.replace(problem, context=solved + problem.context)

        return largest(build, form, self.length, min_units=1)

    def _problem(self, rng: random.Random, letters: int, noise: int) -> Example:
        def variable(rng: random.Random) -> str:
            return "".join(rng.choices(string.ascii_uppercase, k=letters))

        size = self.hops + 1
        names = distinct(variable, rng, self.chains * size)
        chains = [names[i * size : (i + 1) * size] for i in range(self.chains)]
        values = distinct(lambda rng: haystack.number(rng, 5), rng, self.chains)
        lines, depths = [], []
        for chain, value in zip(chains, values, strict=True):
            lines.append(f"VAR {chain[0]} = {value}")
            lines += [f"VAR {to} = VAR {of}" for of, to in itertools.pairwise(chain)]
            depths += sorted(rng.random() for _ in chain)
        hay = haystack.hide([haystack.NOISE] * noise, lines, depths, "\n")
        words = {"value": values[0], "count": size}
        return Example(
            context=_CONTEXT.format(hay=hay),
            question=_QUESTION.format(**words),
            answers=tuple(chains[0]),
            max_new_tokens=30,
            prefix=_PREFIX.format(**words),
        )
