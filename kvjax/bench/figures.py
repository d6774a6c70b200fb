"""Figures of benchmark rows: time per token and memory by context, throughput by batch size. Needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvjax._util.extras import import_matplotlib
from kvjax.bench.case import LARGEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
"""Colours that are distinct for any colour vision (Okabe and Ito 2008). Markers distinguish them as well."""

_MARKERS = "osD^vP*X"

Row = Mapping[str, Any]


def by_context(rows: Sequence[Row]) -> "Figure":
    """Time per output token (dotted: bandwidth bound) and peak memory by context: one column per batch size, one line per policy.

    "largest" batches are excluded, as their sizes differ.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    rows = _measured([row for row in rows if row["batch"] != LARGEST])
    batches = sorted({row["batch"] for row in rows})
    figure, panels = _panels(2, len(batches))
    for column, batch in enumerate(batches):
        group = [row for row in rows if row["batch"] == batch]
        above, below = panels[0][column], panels[1][column]
        _lines(above, group, "context", lambda row: row["tpot_ms"])
        _lines(above, group, "context", lambda row: row["floor_ms"], style=":", labelled=False)
        _lines(below, group, "context", lambda row: row["peak_bytes"] / 1e9)
        above.set_title(f"batch {batch}", fontsize=10)
        below.set_xlabel("context in tokens")
    panels[0][0].set_ylabel("time per output token in ms (dotted: bandwidth bound)")
    panels[1][0].set_ylabel("peak memory in GB")
    panels[0][-1].legend(fontsize=8)
    return figure


def by_batch(rows: Sequence[Row]) -> "Figure":
    """Tokens per second by batch size: one column per context, one line per policy. Errors as for `by_context`."""
    rows = _measured(rows)
    contexts = sorted({row["context"] for row in rows})
    figure, panels = _panels(1, len(contexts))
    for panel, context in zip(panels[0], contexts, strict=True):
        _lines(panel, [row for row in rows if row["context"] == context], "batch_run", lambda row: row["tokens_per_s"])
        panel.set_title(f"{context} tokens", fontsize=10)
        panel.set_xlabel("batch in rows")
    panels[0][0].set_ylabel("tokens decoded per second")
    panels[0][-1].legend(fontsize=8)
    return figure


def title(row: Row) -> str:
    """Label of a row's line: the policy and its settings."""
    settings = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    weights = row.get("weights", "float")
    notes = [
        "" if weights == "float" else f"({weights} weights)",
        "" if row["program"] == "kvjax" else f"({row['program']})",
        f"over {row['mesh']}" if row.get("mesh") else "",
    ]
    return " ".join(filter(None, [row["policy"], settings, *notes]))


def _measured(rows: Sequence[Row]) -> list[Row]:
    found = [row for row in rows if row.get("tpot_ms") is not None]
    if not found:
        raise ValueError("no row has a time to draw; all of them failed, or there are none")
    return found


def _panels(height: int, width: int) -> tuple["Figure", Any]:
    figures, _ = import_matplotlib()
    figure = figures.Figure(figsize=(1.2 + 4.0 * width, 0.8 + 3.2 * height), layout="constrained")
    return figure, figure.subplots(height, width, squeeze=False)


def _lines(
    panel: Any, rows: Sequence[Row], x: str, y: Callable[[Row], Any], style: str = "-", labelled: bool = True
) -> None:
    """One line per policy, on logarithmic axes, with a colour by its order in the rows."""
    names = list(dict.fromkeys(map(title, rows)))
    for i, name in enumerate(names):
        points = sorted((row[x], y(row)) for row in rows if title(row) == name and y(row) is not None)
        if points:
            panel.plot(
                *zip(*points, strict=True),
                style,
                color=_COLOURS[i % len(_COLOURS)],
                marker=_MARKERS[i % len(_MARKERS)] if labelled else None,
                label=name if labelled else None,
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
