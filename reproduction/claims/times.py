"""The papers' claims about time and memory beside the results of `benchmarks.decode`; a section of docs/reproduction.md."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from benchmarks import report, tables
from reproduction.intervals import means_interval

RESULTS = tables.RESULTS / "decode-h200.json"

TITLE = "Time and memory"

ABOUT = """\
Measured by `python -m benchmarks.decode` with random weights of Llama-3.1-8B's shape, see [speed](speed.md). Papers measured on other
devices, and against other programs, that spend more on a step besides attention, or less; so what is judged is only whether a method is
better than the other, or, where a claim has a margin, no more than so much worse; and both factors are told. A claim about time **holds**
if the 95 % interval of the difference of the means of repeated runs is in its favour, **fails** if it is as clearly against it."""

Measure = Literal["TPOT", "TTFT", "tokens per second", "memory"]

FIELDS: Mapping[Measure, tuple[str, str, float]] = {
    "TPOT": ("tpot_all_ms", "{:.2f} ms", 1.0),
    "TTFT": ("ttft_all_s", "{:.2f} s", 1.0),
    "tokens per second": ("tpot_all_ms", "{:.0f}", 1.0),
    "memory": ("peak_bytes", "{:.1f} GB", 1e-9),
}
"""Of each measure the result file's field, how it is shown, and the factor to what is shown."""

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Factor:
    """A claim that a method takes less time or memory than another, or is faster.

    Attributes:
        says, where, paper: as in `Claim`; numbers as the paper has them.
        context: tokens of the prompt.
        batch: rows, or "largest" for as many as fit.
        settings: of the method in the result file.
        margin: by what share it may be worse.
    """

    says: str
    where: str
    paper: str
    measure: Measure
    method: str
    other: str
    context: int
    settings: Mapping[str, Any]
    batch: int | str = 1
    margin: float = 0.0

    def samples(self, rows: Rows) -> tuple[np.ndarray, np.ndarray] | None:
        """Of the method and the other, repeated runs in the measure's unit; None where one is not measured."""
        for prefill in (True, False):  # peaks include prefill or not, for both alike
            kind = [row for row in rows if row["prefill"] == prefill]
            ours, other = self._of(kind, self.method, self.settings), self._of(kind, self.other, {})
            if ours is not None and other is not None:
                return ours, other
        return None

    def _of(self, rows: Rows, policy: str, settings: Mapping[str, Any]) -> np.ndarray | None:
        field, _, factor = FIELDS[self.measure]
        asked = {"program": "kvjax", "policy": policy, "context": self.context, "batch": self.batch}
        fitting = [
            row
            for row in rows
            if all(row.get(name) == value for name, value in asked.items())
            and settings.items() <= row["settings"].items()
            and ("eta" in settings) == ("eta" in row["settings"])
            and "reuse" not in row["settings"]
            and row.get(field) is not None
        ]
        if not fitting:
            return None
        values = np.atleast_1d(np.asarray(fitting[-1][field], float)) * factor
        return 1000 * fitting[-1]["batch_run"] / values if self.measure == "tokens per second" else values

    def verdict(self, rows: Rows) -> str:
        """The verdict by these measurements."""
        found = self.samples(rows)
        if found is None:
            return "not measured yet"
        sign = 1 if self.measure == "tokens per second" else -1
        ours, other = found[0], found[1] * (1 - sign * self.margin)
        if self.measure == "memory":  # from XLA's memory analysis, which does not vary
            return "holds" if ours[0] <= other[0] else "fails"
        mean, width = means_interval([sign * ours, -sign * other])
        if not abs(mean) > width:
            return "undecided"
        return "holds" if mean > 0 else "fails"

    def ours(self, rows: Rows) -> str:
        """Both numbers, and how many times better the method's is."""
        found = self.samples(rows)
        if found is None:
            return ""
        mine, other = (float(np.mean(each)) for each in found)
        better = mine / other if self.measure == "tokens per second" else other / mine
        show = FIELDS[self.measure][1]
        return f"{show.format(mine)}, {show.format(other)}: {better:.2f} times"


chelsea = partial(
    Factor, where="Table 3 (Llama-3.1-8B-Instruct)", method="chelsea", other="full", settings={"budget": 0.2}
)
clusterkv = partial(Factor, method="clusterkv", context=32768, settings={"budget": 1024})
catekv = partial(
    Factor,
    where="Table 4 (Llama-3-8B-1M on an A100)",
    method="catekv",
    other="full",
    settings={"eta": 0.7, "share_adaptive": 0.3},
)

FACTORS = (
    *(
        chelsea(
            f"At {context} tokens Chelsea takes less time per token than full attention",
            paper=paper,
            measure="TPOT",
            context=context,
        )
        for context, paper in (
            (16384, "0.035 s, 0.043 s: 1.23 times"),
            (32768, "0.036 s, 0.071 s: 1.97 times"),
            (65536, "0.043 s, 0.137 s: 3.19 times"),
        )
    ),
    *(
        chelsea(
            f"At {context} tokens Chelsea takes less memory than full attention",
            paper=paper,
            measure="memory",
            context=context,
        )
        for context, paper in (
            (16384, "15.86 GB, 19.38 GB"),
            (32768, "16.69 GB, 23.53 GB"),
            (65536, "18.36 GB, 31.83 GB"),
        )
    ),
    *(
        chelsea(
            f"At {context} tokens clustering adds no more than 5 % to the time to first token",
            paper=f"{paper}; the margin is this page's",
            measure="TTFT",
            context=context,
            margin=0.05,
        )
        for context, paper in ((32768, "4.306 s, 4.212 s"), (65536, "11.500 s, 11.421 s"))
    ),
    clusterkv(
        "With a budget of 1024 and a prompt of 32k ClusterKV writes more tokens per second than full attention",
        "Figure 12, section V-C",
        "up to 2.5 times",
        "tokens per second",
        other="full",
    ),
    clusterkv(
        "With a budget of 1024 and a prompt of 32k it is as fast as Quest, to 5 %",
        "Figure 13b, section V-C",
        "deviations of up to 5 %",
        "TPOT",
        other="quest",
        margin=0.05,
    ),
    catekv(
        "At 500 thousand tokens CateKV (r = 0.3, η = 0.7) takes less time per token than full attention",
        paper="2.18 times",
        measure="TPOT",
        context=512000,
    ),
    catekv("At 500 thousand tokens it takes less memory", paper="2.72 times", measure="memory", context=512000),
    catekv(
        "At 40 thousand tokens, in the largest batches that fit, it writes more tokens per second",
        paper="3.96 times",
        measure="tokens per second",
        context=40960,
        batch="largest",
    ),
)


def recorded() -> dict[str, Any]:
    """The result file's content."""
    return report.read(RESULTS)


def render(content: Mapping[str, Any]) -> str:
    """The part of the page."""
    device, rows = content["header"]["device"], content["rows"]
    lines = [
        [factor.says, f"{factor.where}: {factor.paper}", factor.measure, factor.ours(rows), factor.verdict(rows)]
        for factor in FACTORS
    ]
    table = report.table(["claim", "in the paper", "measure", "ours", "verdict"], lines, "l")
    return f"## {TITLE}\n\n{ABOUT}\n\nMeasured on {device}.\n\n{table}\n"
