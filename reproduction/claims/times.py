"""The papers' claims about time and memory beside the results of `benchmarks.decode`: a section of the papers' pages."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from benchmarks import report, tables
from kvjax.evals.intervals import means_interval

RESULTS = tables.RESULTS / "decode-h200.json"

MODEL = "Llama-3.1-8B, random weights"
"""What the tables call the model."""

ABOUT = """\
The papers used other hardware and other baselines, so only the direction of a claim is judged. Both ratios are shown. A claim about time holds
if the means of repeated calls differ significantly (95 %). The first call warms the device up and is not counted. Memory is XLA's memory analysis of
the compiled programs. More figures: [speed](../speed.md)."""

PROVENANCE = """\
Time and memory: Llama-3.1-8B's shape with random weights, measured by `python -m benchmarks.decode`.
"""

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
        """Of the method and the other, repeated calls in the measure's unit; None where one is not measured."""
        kind = self._kind(rows)
        if kind is None:
            return None
        return self._numbers(kind[0]), self._numbers(kind[1])

    def _kind(self, rows: Rows) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Rows of the method and the other, both with prefill or both without."""
        for prefill in (True, False):
            kind = [row for row in rows if row["prefill"] == prefill]
            ours, other = self._of(kind, self.method, self.settings), self._of(kind, self.other, {})
            if ours is not None and other is not None:
                return ours, other
        return None

    def _of(self, rows: Rows, policy: str, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
        asked = {"program": "kvjax", "policy": policy, "context": self.context, "batch": self.batch}
        fitting = [
            row
            for row in rows
            if all(row.get(name) == value for name, value in asked.items())
            and settings.items() <= row["settings"].items()
            and ("eta" in settings) == ("eta" in row["settings"])
            and "reuse" not in row["settings"]
            and row.get(FIELDS[self.measure][0]) is not None
        ]
        return fitting[-1] if fitting else None

    def _numbers(self, row: Mapping[str, Any]) -> np.ndarray:
        field, _, factor = FIELDS[self.measure]
        values = np.atleast_1d(np.asarray(row[field], float)) * factor
        if field == "tpot_all_ms" and len(values) > 1:
            values = values[1:]  # the first call warms the device up
        return 1000 * row["batch_run"] / values if self.measure == "tokens per second" else values

    def measured(self, rows: Rows) -> str:
        """What the numbers are of. Memory includes prefill or not, for both methods alike."""
        kind = self._kind(rows)
        if self.measure != "memory" or kind is None:
            return self.measure
        return "memory of prefill and decoding" if kind[0]["prefill"] else "memory of decoding"

    def verdict(self, rows: Rows) -> str:
        """The verdict by these measurements."""
        found = self.samples(rows)
        if found is None:
            return "not measured"
        sign = 1 if self.measure == "tokens per second" else -1
        ours, other = found[0], found[1] * (1 - sign * self.margin)
        if self.measure == "memory":  # from XLA's memory analysis, which does not vary
            return "holds" if ours[0] <= other[0] else "fails"
        mean, width = means_interval([sign * ours, -sign * other])
        if not abs(mean) > width:
            return "undecided"
        return "holds" if mean > 0 else "fails"

    def ours(self, rows: Rows) -> str:
        """Both medians, and how many times better the method's is."""
        found = self.samples(rows)
        if found is None:
            return ""
        mine, other = (float(np.median(each)) for each in found)
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
            paper=f"{paper}; the margin is ours",
            measure="TTFT",
            context=context,
            margin=0.05,
        )
        for context, paper in ((32768, "4.306 s, 4.212 s"), (65536, "11.500 s, 11.421 s"))
    ),
    clusterkv(
        "With a budget of 1024 and a prompt of 32k ClusterKV generates more tokens per second than full attention",
        "Figure 12, section V-C",
        "up to 2.5 times",
        "tokens per second",
        other="full",
    ),
    clusterkv(
        "With a budget of 1024 and a prompt of 32k its TPOT is within 5 % of Quest's",
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
        "At 40 thousand tokens, in the largest batches that fit, it generates more tokens per second",
        paper="3.96 times",
        measure="tokens per second",
        context=40960,
        batch="largest",
    ),
)


def recorded() -> dict[str, Any]:
    """The result file's content."""
    return report.read(RESULTS)


def of(paper: str) -> list[Factor]:
    """A paper's claims."""
    return [factor for factor in FACTORS if factor.method == paper]


def render(paper: str, content: Mapping[str, Any]) -> str:
    """The section of a paper's page."""
    device, rows = content["header"]["device"], content["rows"]
    lines = [
        [
            f"{factor.says} (*{factor.where}:* {factor.paper})",
            factor.measured(rows),
            factor.ours(rows),
            factor.verdict(rows),
        ]
        for factor in of(paper)
    ]
    table = report.table(["claim", "measure", f"{MODEL}, {device}", "verdict"], lines, "l")
    return f"## Time and memory\n\n{ABOUT}\n\n{table}\n"
