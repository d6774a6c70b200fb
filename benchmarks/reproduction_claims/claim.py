"""A claim of a paper, the rule by which it is judged, and the measurements that it is judged by."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Verdict = Literal["yes", "no", "undecided", "not measured"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """How a kind of number is read and shown.

    Attributes:
        better: which of two numbers is the better one.
        show: a format string.
    """

    better: Literal["lower", "higher"]
    show: str


MEASURES: Mapping[str, Measure] = {
    "perplexity": Measure("lower", "{:.2f}"),
    "agreement": Measure("higher", "{:.1%}"),
    "recall of important tokens": Measure("higher", "{:.1%}"),
    "attention recalled": Measure("higher", "{:.1%}"),
    "L1 loss of the cache": Measure("lower", "{:.4f}"),
    "attention cosine": Measure("higher", "{:.4f}"),
    "Jaccard of adjacent layers": Measure("higher", "{:.3f}"),
    "needle accuracy": Measure("higher", "{:.1%}"),
    "cache in MB": Measure("lower", "{:.1f}"),
}
"""All that sections measure, by name."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One number for each sample (a text, or a question): a line of the result file.

    Attributes:
        measure: a key of `MEASURES`.
        method: what was measured; of methods at one place, samples are the same ones in the same order.
        at: where: a length, a budget, or a ratio, in words.
    """

    measure: str
    method: str
    at: str
    samples: list[float]

    @property
    def mean(self) -> float:
        """Over all samples."""
        return float(np.mean(self.samples))

    @property
    def shown(self) -> str:
        """The mean as tables have it."""
        return MEASURES[self.measure].show.format(self.mean)


Table = Mapping[tuple[str, str, str], Row]
"""Rows by measure, method and place."""


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The rows of a result file, to be looked up."""
    found = [Row(**row) for row in rows]
    return {(row.measure, row.method, row.at): row for row in found}


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says, and whether it holds here: `method` is better than each of `others`, by more than `margin`.

    Samples are compared one by one. A difference counts if its mean over the samples is more than two standard errors of that
    mean away from the margin; else it is undecided. The claim holds if it does against each of the others, and fails if it does
    against any of them.

    Attributes:
        says: the claim, in few words.
        where: table, figure or section.
        paper: its numbers and their setting.
        margin: in units of the measure; below zero, the method may be worse by as much.
    """

    says: str
    where: str
    paper: str
    measure: str
    method: str
    others: tuple[str, ...]
    at: str
    margin: float = 0.0

    def verdict(self, measured: Table) -> Verdict:
        """Whether the claim holds for these measurements."""
        rows = self._rows(measured)
        if rows is None:
            return "not measured"
        sign = 1 if MEASURES[self.measure].better == "higher" else -1
        ours, *others = (sign * np.asarray(row.samples) for row in rows)
        single = [_clear(ours - other - self.margin) for other in others]
        if "no" in single:
            return "no"
        return "undecided" if "undecided" in single else "yes"

    def ours(self, measured: Table) -> str:
        """The numbers that the verdict is about."""
        rows = self._rows(measured)
        return "" if rows is None else ", ".join(f"`{row.method}` {row.shown}" for row in rows)

    @property
    def rule(self) -> str:
        """What is compared, in words."""
        measure = MEASURES[self.measure]
        margin = measure.show.format(abs(self.margin))
        others = " and ".join(f"`{other}`" for other in self.others)
        if self.margin < 0:
            return f"{self.measure} of `{self.method}` no more than {margin} worse than that of {others}"
        return f"{self.measure} of `{self.method}` {measure.better} than that of {others}" + (
            f" by more than {margin}" if self.margin else ""
        )

    def _rows(self, measured: Table) -> list[Row] | None:
        keys = [(self.measure, method, self.at) for method in (self.method, *self.others)]
        return [measured[key] for key in keys] if all(key in measured for key in keys) else None


def _clear(differences: np.ndarray) -> Verdict:
    """Whether paired differences are above zero; of a single one, its sign is all there is."""
    mean, count = float(np.mean(differences)), len(differences)
    error = float(np.std(differences, ddof=1)) / count**0.5 if count > 1 else 0.0
    if abs(mean) <= 2 * error or mean == 0:
        return "undecided"
    return "yes" if mean > 0 else "no"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a section found.

    Attributes:
        settings: in the result file and on the page, by name.
    """

    settings: dict[str, Any]
    rows: Sequence[Row]
