"""Recall of important tokens by policy and budget (ClusterKV, section V-B, Figure 11)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.analysis.recall import SparsePolicy, recall_rate, replay
from kvjax.analysis.recording import Recorded
from kvjax.extras import import_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rates(
    layers: Sequence[Recorded],
    policies: Mapping[str, SparsePolicy],
    budgets: Sequence[int],
    prompt: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[int, float]]:
    """Recall rate by policy and budget, averaged over layers, query heads and decoding steps (Figure 11).

    Args:
        layers: a text as recorded; leave out the first `dense_layers`.
        policies: whose budgets are replaced by each of `budgets`.
        prompt: how many tokens of the text are the prompt.
        progress: called with layers replayed and in all, those of all policies and budgets counted.
    """
    found: dict[str, dict[int, float]] = {}
    done, total = 0, len(policies) * len(budgets) * len(layers)
    for name, policy in policies.items():
        found[name] = {}
        for budget in budgets:
            means = []
            for layer in layers:
                selected = replay(dataclasses.replace(policy, budget=budget), layer, prompt)
                means.append(np.mean(recall_rate(selected.chosen, selected.logits)))
                done += 1
                if progress is not None:
                    progress(done, total)
            found[name][budget] = float(np.mean(means))
    return found


def draw_rates(rates: Mapping[str, Mapping[int, float]]) -> "Figure":
    """Recall rate over budget, one line per policy (Figure 11).

    Args:
        rates: as `rates` returns them.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    figures, _ = import_matplotlib()
    if not rates:
        raise ValueError("no rates to draw; give at least one policy's")
    figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    for (name, line), marker in zip(rates.items(), "os^Dv<>PX*" * len(rates), strict=False):
        panel.plot(list(line), list(line.values()), marker=marker, markersize=4, linewidth=1.2, label=name)
    panel.set_xlabel("budget in tokens")
    panel.set_ylabel("recall rate of the most attended tokens")
    panel.set_ylim(0, 1)
    panel.legend(frameon=False, fontsize=9)
    return figure
