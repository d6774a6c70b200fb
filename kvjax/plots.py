"""Pictures of what policies keep. Needs matplotlib: the `plot` extra."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax.inspection import retained_positions
from kvjax.models import Params
from kvjax.policies import HeadProfile, Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = "viridis_r"
"""Even steps of lightness, readable with any colour vision and in grey."""


def kept_tokens(
    params: Params,
    prompt: str | Sequence[int],
    policies: Mapping[str, Policy] | Sequence[Policy],
    max_new_tokens: int = 64,
) -> "Figure":
    """Run each policy on a prompt and draw which positions its cache holds at every step.

    Args:
        prompt: text or token ids.
        policies: one panel each, titled by its key or, in a sequence, by its name and budget.
        max_new_tokens: tokens to draw, greedily.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no policy to draw, or as `kvjax.inspection.retained_positions`.
    """
    _matplotlib()
    named = policies if isinstance(policies, Mapping) else {_title(policy): policy for policy in policies}
    return draw({name: retained_positions(params, prompt, policy, max_new_tokens) for name, policy in named.items()})


def draw(held: Mapping[str, Float[np.ndarray, "S P"]]) -> "Figure":
    """One panel for each array of `retained_positions`, drawn to the same scale.

    Args:
        held: panels by title.
    """
    figures, colormaps = _matplotlib()
    if not held:
        raise ValueError("no policy to draw; give at least one")
    figure = figures.Figure(figsize=(2.2 + 3.1 * len(held), 4.2), layout="constrained")
    panels = figure.subplots(1, len(held), sharex=True, sharey=True, squeeze=False)[0]
    colours = colormaps[_COLOURS].with_extremes(under="white", bad="0.9")
    image = None
    for panel, (title, shares) in zip(panels, held.items(), strict=True):
        steps, positions = shares.shape
        prompt = positions - steps + 1
        unwritten = np.arange(positions) >= prompt + np.arange(steps)[:, None]
        # Cells are centred on whole numbers; what no head holds lies below vmin, and is white.
        image = panel.imshow(
            np.where(unwritten, np.nan, shares), aspect="auto", interpolation="nearest", cmap=colours, vmin=1e-9, vmax=1
        )
        panel.axvline(prompt - 0.5, color="0.3", linewidth=0.8, linestyle=":")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(f"position in tokens ({prompt} of prompt, then new)")
    figure.suptitle(
        "What is in the cache: each row is a step, white has been dropped, grey is yet to be written", fontsize=11
    )
    panels[0].set_ylabel("tokens written since the prompt")
    figure.colorbar(image, ax=panels, label="share of heads that hold the token", fraction=0.05, pad=0.02)
    return figure


def head_map(profile: HeadProfile) -> "Figure":
    """The scores of a head profile as a map of layers × KV heads, a dot on each head of the rarer label.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figures, _ = _matplotlib()
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
        rows: each with a `score` and `labels` that have `length` and `depth`; scores of one cell are averaged.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    figures, _ = _matplotlib()
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


def _title(policy: Policy) -> str:
    budget: Any = getattr(policy, "budget", None)
    return policy.name if budget is None else f"{policy.name}, budget {budget}"


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib import colormaps, figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'kvjax[plot]'") from None
    return figure, colormaps
