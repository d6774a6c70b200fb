"""A claim of a paper, the rule by which it is judged, and the measurements that it is judged by."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvjax.evals.intervals import mean_interval

Kind = Literal["perplexity", "needle", "RULER", "LongBench", "GSM8K", "recall", "layers"]
"""A paper's kind of measure. "layers" are similarities and losses of caches, which are not quality by themselves."""

Verdict = Literal["holds", "fails", "undecided", "no headroom", "proxy", "bound", "not judged", "not measured"]
"""The verdict on a claim against one other method.

"holds", "fails" and "undecided" are judged by the paper's own measure. "no headroom": the model is about as good with StreamingLLM as with
the full cache, so methods cannot be distinguished. "proxy": the measure is not the paper's, or not of quality. "bound": the other is an upper
bound. "not judged": there are numbers, but none of StreamingLLM, so the headroom is unknown.
"""

FULL, STREAMING = "full", "streaming_llm"
"""Names in rows of the full cache and of StreamingLLM. Between the two is the headroom."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """How a measure is compared and shown.

    Attributes:
        better: which of two numbers is the better one.
        show: a format string.
        kind: the papers' kind of measure; None if no paper uses it.
        meaning: for pages, where the text of a section does not say it.
    """

    better: Literal["lower", "higher"]
    show: str
    kind: Kind | None = None
    meaning: str = ""

    @property
    def sign(self) -> int:
        """The factor by which larger is better."""
        return 1 if self.better == "higher" else -1


MEASURES: Mapping[str, Measure] = {
    "perplexity": Measure("lower", "{:.2f}", "perplexity"),
    "agreement": Measure(
        "higher", "{:.1%}", meaning="share of predictions whose most likely token is the same as with the full cache"
    ),
    "recall of important tokens": Measure("higher", "{:.1%}", "recall"),
    "attention recalled": Measure("higher", "{:.1%}", "recall"),
    "L1 loss of the cache": Measure("lower", "{:.4f}", "layers"),
    "attention cosine": Measure("higher", "{:.4f}", "layers"),
    "Jaccard of adjacent layers": Measure("higher", "{:.3f}", "layers"),
    "needle accuracy": Measure("higher", "{:.1%}", "needle"),
    "RULER score": Measure("higher", "{:.1%}", "RULER"),
    "LongBench score": Measure("higher", "{:.1%}", "LongBench"),
    "GSM8K accuracy": Measure("higher", "{:.1%}", "GSM8K"),
    "cache in MB": Measure("lower", "{:.1f}", meaning="allocated for one text, with slots for new tokens"),
}
"""All measures, by name."""


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
    """What a paper says, and what is found here: `method` is better than each of `others`, by more than `margin`.

    Against each of the others there is a verdict of its own (`Pair`).

    Attributes:
        says: the claim, in few words.
        where: table, figure or section.
        paper: its numbers.
        own: what the paper measures by; by any other measure there is no verdict.
        margin: in units of the measure; below zero, the method may be worse by as much.
        bounds: of the others, those that are upper bounds here: to fall short of one is no failure.
        setting: the model, data and sizes of the paper's numbers.
    """

    says: str
    where: str
    paper: str
    own: Kind
    measure: str
    method: str
    others: tuple[str, ...]
    at: str
    margin: float = 0.0
    bounds: tuple[str, ...] = ()
    setting: str = ""

    @property
    def pairs(self) -> "list[Pair]":
        """The comparisons that the claim consists of."""
        return [Pair(self, other) for other in self.others]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A claim against one other method: a row of the page.

    Samples are compared one by one. A difference counts if the 95 % interval of its mean (`mean_interval`) does not reach the margin; else,
    or if there is but one sample, it is undecided.
    """

    claim: Claim
    other: str

    @property
    def counted(self) -> bool:
        """Whether there can be a verdict: by the paper's own measure, and not against an upper bound."""
        own = MEASURES[self.claim.measure].kind == self.claim.own != "layers"
        return own and self.other not in self.claim.bounds

    def verdict(self, measured: Table) -> Verdict:
        """The verdict by these measurements."""
        claim, rows = self.claim, self._rows(measured)
        if rows is None:
            return "not measured"
        if not self.counted:
            return "bound" if self.other in claim.bounds else "proxy"
        if MEASURES[claim.measure].kind != "recall":  # which is of attention, not of what a model can do with it
            ends = [measured.get((claim.measure, name, claim.at)) for name in (FULL, STREAMING)]
            if None in ends:
                return "not judged"
            full, streaming = (np.asarray(row.samples) for row in ends if row is not None)
            if _clear(full - streaming) == "undecided":
                return "no headroom"
        ours, other = (MEASURES[claim.measure].sign * np.asarray(row.samples) for row in rows)
        return _clear(ours - other - claim.margin)

    def ours(self, measured: Table) -> str:
        """The numbers that the verdict is about, and the difference with half its 95 % interval."""
        rows = self._rows(measured)
        if rows is None:
            return ""
        show, (mine, other) = MEASURES[self.claim.measure].show, rows
        mean, width = mean_interval(np.asarray(mine.samples) - np.asarray(other.samples))
        about = "" if np.isnan(width) else f" (difference {show.format(mean)} ± {show.format(width)})"
        return f"{mine.shown}, {other.shown}{about}"

    @property
    def rule(self) -> str:
        """What is compared, in words."""
        claim, measure = self.claim, MEASURES[self.claim.measure]
        margin = measure.show.format(abs(claim.margin))
        if claim.margin < 0:
            return f"{claim.measure} of `{claim.method}` no more than {margin} worse than that of `{self.other}`"
        return f"{claim.measure} of `{claim.method}` {measure.better} than that of `{self.other}`" + (
            f" by more than {margin}" if claim.margin else ""
        )

    def _rows(self, measured: Table) -> list[Row] | None:
        keys = [(self.claim.measure, method, self.claim.at) for method in (self.claim.method, self.other)]
        return [measured[key] for key in keys] if all(key in measured for key in keys) else None


def _clear(differences: np.ndarray) -> Verdict:
    """Whether the mean of paired differences is above zero, by its interval."""
    mean, width = mean_interval(differences)
    if np.isnan(width) or abs(mean) <= width:
        return "undecided"
    return "holds" if mean > 0 else "fails"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a section found.

    Attributes:
        settings: in the result file and on the page, by name.
    """

    settings: dict[str, Any]
    rows: Sequence[Row]
