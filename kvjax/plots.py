"""Figures of what policies keep, and of their quality and cost. Needs matplotlib."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax._util import files
from kvjax._util.extras import import_matplotlib
from kvjax.models import Params
from kvjax.policies import HeadProfile, Policy
from kvjax.runtime.generation import GenerationStats
from kvjax.runtime.inspection import retained_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = "viridis_r"
"""Colours with even steps of lightness, readable with any colour vision and in grey."""


def kept_tokens(
    params: Params,
    prompt: str | Sequence[int],
    policies: Mapping[str, Policy] | Sequence[Policy],
    max_new_tokens: int = 64,
) -> "Figure":
    """Run each policy on a prompt and draw which positions its cache contains at every step.

    Args:
        params: the model.
        prompt: text or token ids.
        policies: one panel each, titled by its key or, in a sequence, by its name and budget.
        max_new_tokens: number of tokens to generate greedily.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no policy to draw, or as `kvjax.runtime.inspection.retained_positions`.

    Example:
        >>> figure = kvjax.plots.kept_tokens(params, [5, 9, 2] * 10, [kvjax.StreamingLLM(budget=8)], max_new_tokens=4)
        >>> len(figure.axes)  # a panel and its scale
        2
    """
    import_matplotlib()
    named = policies if isinstance(policies, Mapping) else {_title(policy): policy for policy in policies}
    return draw({name: retained_positions(params, prompt, policy, max_new_tokens) for name, policy in named.items()})


def draw(
    retained: Mapping[str, Float[np.ndarray, "S P"]],
    title: str = "What is in the cache: each row is a step, white has been dropped, grey is yet to be written",
    label: str = "share of heads that hold the token",
) -> "Figure":
    """One panel for each array of `retained_positions`, with a common scale.

    Args:
        retained: arrays by title.
        title: title of the figure. It is broken into two lines above a single panel.
        label: label of the colour bar.

    Example:
        >>> figure = kvjax.plots.draw({"all tokens": np.tril(np.ones((4, 12)), 8)})  # steps, positions
    """
    figures, colormaps = import_matplotlib()
    if not retained:
        raise ValueError("no policy to draw; give at least one")
    # A single panel is as wide as its title.
    figure = figures.Figure(figsize=(max(2.2 + 3.1 * len(retained), 6.8), 4.2), layout="constrained")
    panels = figure.subplots(1, len(retained), sharex=True, sharey=True, squeeze=False)[0]
    colours = colormaps[_COLOURS].with_extremes(under="white", bad="0.9")
    image = None
    for panel, (name, shares) in zip(panels, retained.items(), strict=True):
        steps, positions = shares.shape
        prompt = positions - steps + 1
        unwritten = np.arange(positions) >= prompt + np.arange(steps)[:, None]
        # Cells are centred on whole numbers. Values that no head keeps are below vmin, and white.
        image = panel.imshow(
            np.where(unwritten, np.nan, shares), aspect="auto", interpolation="nearest", cmap=colours, vmin=1e-9, vmax=1
        )
        panel.axvline(prompt - 0.5, color="0.3", linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(f"position in tokens ({prompt} of prompt, then new)")
    figure.suptitle(title if len(retained) > 1 else title.replace(": ", ":\n", 1), fontsize=11)
    panels[0].set_ylabel("tokens written since the prompt")
    figure.colorbar(image, ax=panels, label=label, fraction=0.05, pad=0.02)
    return figure


def head_map(profile: HeadProfile) -> "Figure":
    """Map of a head profile's scores, layers × KV heads, with a dot on each head of the rarer label.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> facts = {"method": "chelsea", "model": "tiny", "data": "none", "settings": ()}
        >>> profile = kvjax.policies.HeadProfile(**facts, scores=((0.1, 0.9),), labels=(("other", "outlier"),))
        >>> figure = kvjax.plots.head_map(profile)
        >>> len(figure.axes)  # the map and its scale
        2
    """
    figures, _ = import_matplotlib()
    counts = Counter(label for layer in profile.labels for label in layer)
    marked = min(counts, key=lambda label: (counts[label], label))
    scores = np.asarray(profile.scores)
    layers, heads = scores.shape
    figure = figures.Figure(figsize=(2.6 + 0.3 * heads, 1.4 + 0.2 * layers), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(scores, aspect="auto", interpolation="nearest", cmap=_COLOURS)
    if len(counts) > 1:
        rows, columns = zip(*profile.heads(marked), strict=True)
        panel.scatter(columns, rows, s=18, color="white", edgecolors="black", linewidths=0.8)
    panel.set_xticks(range(heads))
    panel.set_xlabel("KV head")
    panel.set_ylabel("layer")
    panel.set_title(f"{profile.method}: {counts[marked]} of {scores.size} heads {marked} (dots)", fontsize=10)
    figure.colorbar(image, ax=panel, label="score", fraction=0.08, pad=0.03)
    return figure


def needle_map(rows: Sequence[Mapping[str, Any]], title: str = "Needle in a haystack") -> "Figure":
    """Accuracy by depth × length, from a needle task's result rows.

    Args:
        rows: rows with a `score`, and `labels` with `length` and `depth`. Scores of a cell are averaged.
        title: title of the figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.

    Example:
        >>> rows = [{"score": 1.0, "labels": {"length": 1024, "depth": depth}} for depth in (0.0, 0.5, 1.0)]
        >>> figure = kvjax.plots.needle_map(rows, title="Full cache")
        >>> figure.axes[0].get_title()
        'Full cache: 1.00'
    """
    figures, _ = import_matplotlib()
    if not rows:
        raise ValueError("no results to draw; give the rows of a needle task")
    lengths, depths = (sorted({row["labels"][name] for row in rows}) for name in ("length", "depth"))
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        cell = depths.index(row["labels"]["depth"]), lengths.index(row["labels"]["length"])
        cells.setdefault(cell, []).append(row["score"])
    scores = np.full((len(depths), len(lengths)), np.nan)
    for cell, found in cells.items():
        scores[cell] = np.mean(found)
    figure = figures.Figure(figsize=(2.4 + 0.7 * len(lengths), 1.6 + 0.35 * len(depths)), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(scores, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=0, vmax=1)
    panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    panel.set_xlabel("length in tokens")
    panel.set_ylabel("depth of the needle")
    panel.set_title(f"{title}: {np.mean([row['score'] for row in rows]):.2f}", fontsize=10)
    figure.colorbar(image, ax=panel, label="accuracy", fraction=0.08, pad=0.03)
    return figure


def costs(stats: Mapping[str, GenerationStats]) -> "Figure":
    """Bars of the cost of runs: bytes of cache on the device, and tokens decoded per second.

    Args:
        stats: statistics of each run, by name.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no runs.

    Example:
        >>> prompt, names = [5, 9, 2] * 10, ("full", "tova:8")
        >>> stats = {name: kvjax.generate(params, prompt, name, max_new_tokens=4).stats for name in names}
        >>> figure = kvjax.plots.costs(stats)
    """
    figures, colormaps = import_matplotlib()
    if not stats:
        raise ValueError("no runs to draw; give the stats of at least one")
    figure = figures.Figure(figsize=(8.0, 1.1 + 0.4 * len(stats)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    measures = {
        "cache in MB (shorter is better)": [run.cache_bytes / 1e6 for run in stats.values()],
        "new tokens per second (longer is better)": [run.decode_tokens_per_second for run in stats.values()],
    }
    for panel, (label, values), shade in zip(panels, measures.items(), (0.75, 0.45), strict=True):
        bars = panel.barh(list(stats), values, color=colormaps[_COLOURS](shade), height=0.6)
        panel.bar_label(bars, fmt="%.3g", padding=3, fontsize=9)
        panel.margins(x=0.15)
        if not any(values):
            panel.set_xlim(0, 1)
        panel.set_xlabel(label)
    panels[0].invert_yaxis()
    return figure


def coloured_text(
    pieces: Sequence[str],
    shares: Mapping[str, Float[np.ndarray, " T"]],
    label: str = "share of heads that hold the token",
    width: int = 100,
) -> "Figure":
    """A text with coloured tokens, once for each array. Tokens with a share of 0 remain white.

    Args:
        pieces: text of each of the T tokens (as from `kvjax.conversion.Tokenizer.stream_decoder`).
        shares: 0 to 1 for each token, by title.
        label: label of the colour bar.
        width: characters per line.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw, or an array does not have one value per token.

    Example:
        >>> figure = kvjax.plots.coloured_text(["Call", " me", " Ishmael"], {"kept": np.array([1.0, 0.0, 0.5])})
    """
    figures, colormaps = import_matplotlib()
    if not shares:
        raise ValueError("no shares to draw; give at least one array")
    for title, values in shares.items():
        if len(values) != len(pieces):
            raise ValueError(f"{title} has {len(values)} shares for {len(pieces)} tokens; give one per token")
    places = _lines(pieces, width)
    lines = 1 + max((line for line, _, _ in places), default=0)
    # Inches: letters of matplotlib's default font, at 8 points, are 0.067 wide, or 0.07 in whole pixels.
    column, row, head, margin, scale = 0.07, 0.19, 0.3, 0.1, 0.9
    wide, high = 2 * margin + column * width + scale, len(shares) * (head + row * lines) + 2 * margin
    figure = figures.Figure(figsize=(wide, high))
    colours = colormaps[_COLOURS]
    for i, (title, values) in enumerate(shares.items()):
        bottom = high - margin - (i + 1) * (head + row * lines)
        panel = figure.add_axes((margin / wide, bottom / high, column * width / wide, row * lines / high))
        panel.set(xlim=(0, width), ylim=(lines, 0))
        panel.axis("off")
        panel.set_title(title, fontsize=10, loc="left", pad=3)
        for (line, start, text), value in zip(places, values, strict=True):
            ground = colours(float(value)) if value > 0 else (1.0, 1.0, 1.0, 1.0)
            ink = "white" if np.dot(ground[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
            panel.broken_barh([(start, len(text))], (line + 0.04, 0.92), color=ground, linewidth=0)
            panel.text(
                start, line + 0.5, text, color=ink, family="monospace", fontsize=8, va="center", parse_math=False
            )
    bar = figure.add_axes(((2 * margin + column * width) / wide, 0.1, 0.12 / wide, 0.8))
    bar.imshow(np.linspace(0, 1, 256)[:, None], cmap=_COLOURS, origin="lower", extent=(0, 1, 0, 1), aspect="auto")
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.yaxis.set_label_position("right")
    bar.set_ylabel(label, fontsize=9)
    return figure


def _lines(pieces: Sequence[str], width: int) -> list[tuple[int, int, str]]:
    """Line, column and printed text of each token. Lines break at the text's breaks, and before tokens that do not fit."""
    places, line, column = [], 0, 0
    for piece in pieces:
        text = piece.rstrip("\n").replace("\n", " ")
        if column and column + len(text) > width:
            line, column = line + 1, 0
        places.append((line, column, text))
        column += len(text)
        if piece.endswith("\n"):
            line, column = line + 1, 0
    return places


def tradeoff(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Quality over memory and, if it was timed, over speed. One row of panels per task, one line per policy, and the full cache as reference.

    The five policies with the best mean have colours and names, the others are grey. With a single budget, at which all policies have the same bytes, policies are listed instead, best first.

    Args:
        rows: rows of a comparison's `table.json`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.

    Example:
        >>> facts = {"task": "needle", "settings": {}, "metric": "score", "higher_is_better": True}
        >>> facts |= {"full_cache_bytes": 4e6, "standard_error": None, "tokens_per_second": None}
        >>> shares = {"snapkv": (0.25, 1e6, 0.5), "full": (None, 4e6, 0.9)}
        >>> rows = [
        ...     {**facts, "policy": name, "target": target, "cache_bytes": held, "value": value}
        ...     for name, (target, held, value) in shares.items()
        ... ]
        >>> figure = kvjax.plots.tradeoff(rows)
        >>> len(figure.axes)
        1
    """
    figures, _ = import_matplotlib()
    if not rows:
        raise ValueError("no results to draw; give the rows of a comparison")
    tasks, policies = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "policy"))
    listed = len({row["target"] for row in rows if row["target"] is not None}) <= 1
    panel = max(1.2 + 0.24 * len(policies), 2.2) if listed else 3.6  # inches; a line of the list is about a quarter
    timed = any(row["tokens_per_second"] is not None for row in rows)
    size = 9.2 if timed else 6.4, 0.6 + panel * len(tasks)
    figure = figures.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(tasks), 2 if timed else 1, squeeze=False, sharey="row")
    for panels, task in zip(grid, tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        better = "higher" if mine[0]["higher_is_better"] else "lower"
        quality = f"{mine[0]['metric']} ({better} is better)"
        panels[0].set_title(task, fontsize=10, loc="left")
        if listed:
            _listed(panels, mine, quality)
        else:
            _over_memory_and_speed(panels, mine, quality, policies)
    return figure


def _listed(panels: Any, rows: Sequence[Mapping[str, Any]], quality: str) -> None:
    """One marker per policy for its value and its speed. Its label shows its fraction of the full cache's bytes."""
    best = -1 if rows[0]["higher_is_better"] else 1
    ranked = sorted(rows, key=lambda row: math.inf if row["value"] is None else best * row["value"])
    names = [f"{row['policy']} ({100 * row['cache_bytes'] / row['full_cache_bytes']:.0f} %)" for row in ranked]
    axes = (("value", quality), ("tokens_per_second", _SPEED))
    for panel, (field, label) in zip(panels, axes[: len(panels)], strict=True):
        for place, row in enumerate(ranked):
            if row[field] is not None:
                panel.plot(row[field], place, "o", color=_REFERENCE if row["policy"] == "full" else _SINGLE)
                if row["policy"] == "full":
                    panel.axvline(row[field], **_DASHED)
        panel.set_xlabel(label)
        panel.grid(axis="y", color="0.9")
        panel.set_axisbelow(True)
        _readable(panel.xaxis, panel.set_xlim)
        _or_untimed(panel, rows, field)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylabel("policy (bytes, of the full cache's)")
    panels[0].set_ylim(len(names) - 0.5, -0.5)


def _over_memory_and_speed(
    panels: Any, rows: Sequence[Mapping[str, Any]], quality: str, policies: Sequence[str]
) -> None:
    axes = (("cache_bytes", 1e6, "bytes held, MB"), ("tokens_per_second", 1, _SPEED))
    colours = dict(zip(_best(rows, policies), _LINES, strict=False)) | {"full": _REFERENCE}
    every_end: list[dict[str, tuple[float, float]]] = []
    for panel, (field, unit, label) in zip(panels, axes[: len(panels)], strict=True):
        ends: dict[str, tuple[float, float]] = {}
        every_end.append(ends)
        for policy in policies:
            points = sorted(
                (row[field] / unit, row["value"])
                for row in rows
                if row["policy"] == policy and None not in (row[field], row["value"])
            )
            if not points:
                continue
            named = policy in colours
            style = {
                "color": colours.get(policy, _OTHERS),
                "marker": "o",
                "markersize": 5 if named else 3,
                "linewidth": 1.5 if named else 0.8,
                "zorder": 3 if named else 1,
                "label": policy,
            }
            panel.plot(*zip(*points, strict=True), linestyle="-" if len(points) > 1 else "none", **style)
            if named:
                ends[policy] = points[-1]
            if policy == "full":
                panel.axhline(points[0][1], **_DASHED)
        panel.set_xlabel(label)
        _readable(panel.xaxis, panel.set_xlim)
        _or_untimed(panel, rows, field)
    _readable(panels[0].yaxis, panels[0].set_ylim)
    panels[0].set_ylabel(quality)
    for panel, ends in zip(panels, every_end, strict=True):
        _name(panel, ends, colours)


def _best(rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> list[str]:
    """As many policies as there are colours, besides the full cache, by their mean over budgets."""
    sign = 1 if rows[0]["higher_is_better"] else -1
    values = {
        policy: [sign * row["value"] for row in rows if row["policy"] == policy and row["value"] is not None]
        for policy in policies
        if policy != "full"
    }
    ranked = sorted((name for name in values if values[name]), key=lambda name: -float(np.mean(values[name])))
    return ranked[: len(_LINES)]


def _name(panel: Any, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """Write names in a column right of the panel, each as high as its line's end, or higher where another is there."""
    low, high = panel.get_ylim()
    below = -math.inf
    for policy, (_, value) in sorted(ends.items(), key=lambda end: end[1][1]):
        below = max((value - low) / (high - low), below + _NAME_HEIGHT)
        text = {"transform": panel.transAxes, "va": "center", "fontsize": 9, "color": colours[policy]}
        panel.text(1.02, below, policy, **text)


def _readable(axis: Any, set_limits: Callable[[float, float], Any]) -> None:
    """Make ticks show values instead of offsets, and keep nearly equal values from being spread over the axis."""
    axis.get_major_formatter().set_useOffset(False)
    low, high = axis.get_data_interval()
    if not math.isfinite(low) or not math.isfinite(high):
        return
    middle = (low + high) / 2
    least = _LEAST_SPREAD * abs(middle) if abs(middle) > _NOTHING else 1.0
    if high - low < least:
        set_limits(middle - least, middle + least)


_NOTHING = 1e-6
"""Values below this size count as 0."""

_LEAST_SPREAD = 0.02
"""Minimum extent of an axis, as a fraction of its values. A smaller range is widened."""


def _or_untimed(panel: Any, rows: Sequence[Mapping[str, Any]], field: str) -> None:
    if all(row[field] is None for row in rows):
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color="0.5")
        panel.set_xticks([])


_SPEED = "tokens decoded per second"

_REFERENCE, _SINGLE = "black", "#0072B2"

_DASHED = {"color": "0.5", "linewidth": 0.8, "linestyle": "--", "zorder": 0}

_LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
"""Colours that are distinct for any colour vision (Okabe and Ito 2008)."""

_OTHERS = "0.75"
"""The grey of policies without a colour."""

_NAME_HEIGHT = 0.055
"""Distance of names, as a fraction of a panel's height."""


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure atomically, in the format of the file's suffix: .png, .svg or .pdf; PNG without a suffix.

    Raises:
        ValueError: matplotlib does not support the format.

    Example:
        >>> import tempfile
        >>> figure = kvjax.plots.coloured_text(["Call", " me"], {"kept": np.array([1.0, 0.0])})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kvjax.plots.save(figure, f"{folder}/kept.png")
    """
    with files.writing(path) as stream:
        figure.savefig(stream, format=Path(path).suffix[1:] or "png", dpi=150)


def check_format(path: str | Path) -> None:
    """Raise what `save` would raise for this name, before anything is drawn.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not support the format.

    Example:
        >>> kvjax.plots.check_format("kept.svg")
    """
    figures, _ = import_matplotlib()
    known, ending = figures.Figure().canvas.get_supported_filetypes(), Path(path).suffix[1:]
    if ending and ending.lower() not in known:
        raise ValueError(
            f"{path}: pictures cannot be written as {ending!r}; give a name that ends in .png, .svg or .pdf"
        )


def _title(policy: Policy) -> str:
    budget: Any = getattr(policy, "budget", None)
    return policy.info.name if budget is None else f"{policy.info.name}, budget {budget}"
