"""Similarity of a head's keys, and its decay with distance (Chelsea, section 4, observations 1 to 3)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from kvjax._util.extras import import_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def similarity(keys: Float[np.ndarray, "T H"]) -> Float[np.ndarray, "T T"]:
    """Cosine similarity of all pairs of a head's keys (Figure 2).

    Args:
        keys: rotated keys: `kvjax.analysis.recording.record(params, tokens)[layer].k[:, head]`.

    Example:
        >>> from kvjax.analysis.key_similarity import similarity
        >>> similarity(np.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], np.float32)).tolist()
        [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """
    unit = _unit(keys)
    return unit @ unit.T


def by_distance(keys: Float[np.ndarray, "T K H"], distance: int = 256) -> Float[np.ndarray, "K D"]:
    """Mean cosine similarity of keys 1, 2, … `distance` tokens apart, in each head (Figure 3).

    The paper averages sampled tokens within a region of 256; this function averages all pairs.

    Args:
        keys: rotated keys of one layer: `kvjax.analysis.recording.record(params, tokens)[layer].k`.
        distance: D, maximum distance in tokens.

    Raises:
        ValueError: the text has no tokens that far apart.

    Example:
        >>> from kvjax.analysis.key_similarity import by_distance
        >>> keys = np.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], np.float32)[:, None]  # tokens, heads, channels
        >>> by_distance(keys, distance=2).tolist()
        [[0.0, 1.0]]
    """
    if not 0 < distance < len(keys):
        raise ValueError(f"distance={distance} in a text of {len(keys)} tokens; give 1 to {len(keys) - 1}")
    unit = _unit(keys)
    curves = [np.einsum("tkh,tkh->k", unit[d:], unit[:-d]) / (len(unit) - d) for d in range(1, distance + 1)]
    return np.stack(curves, axis=1)


def draw_maps(maps: Mapping[str, Float[np.ndarray, "T T"]]) -> "Figure":
    """Heat maps of `similarity`, one per head, with a common scale.

    Args:
        maps: matrices by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.

    Example:
        >>> from kvjax.analysis.key_similarity import draw_maps, similarity
        >>> from kvjax.analysis.recording import record
        >>> keys = record(params, [5, 9, 2] * 4)[0].k
        >>> figure = draw_maps({f"head {k}": similarity(keys[:, k]) for k in range(2)})
        >>> len(figure.axes)  # the last one is the scale
        3
    """
    figures, _ = import_matplotlib()
    if not maps:
        raise ValueError("no similarity to draw; give at least one head's")
    figure = figures.Figure(figsize=(1.2 + 3.4 * len(maps), 3.7), layout="constrained")
    panels = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[0]
    image = None
    for panel, (title, matrix) in zip(panels, maps.items(), strict=True):
        image = panel.imshow(matrix, interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("position in tokens")
    panels[0].set_ylabel("position in tokens")
    figure.colorbar(image, ax=panels, label="cosine similarity of keys", fraction=0.05, pad=0.02)
    return figure


def draw_by_distance(curves: Mapping[str, Float[np.ndarray, " D"]]) -> "Figure":
    """Line plot of mean similarity against distance.

    Args:
        curves: curves by name, each at distances 1, 2, ….

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.

    Example:
        >>> from kvjax.analysis.key_similarity import by_distance, draw_by_distance
        >>> from kvjax.analysis.recording import record
        >>> keys = record(params, [5, 9, 2] * 4)[0].k
        >>> figure = draw_by_distance({f"head {k}": curve for k, curve in enumerate(by_distance(keys, distance=8))})
        >>> len(figure.axes[0].lines)
        2
    """
    figures, colormaps = import_matplotlib()
    if not curves:
        raise ValueError("no curve to draw; give at least one")
    figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    shades = colormaps["viridis_r"](np.linspace(0.15, 1, len(curves)))
    for (name, curve), shade in zip(curves.items(), shades, strict=True):
        panel.plot(np.arange(1, len(curve) + 1), curve, color=shade, linewidth=1.3, label=name)
    panel.set_xlabel("distance in tokens")
    panel.set_ylabel("mean cosine similarity of keys")
    panel.legend(frameon=False, fontsize=9)
    return figure


def _unit(keys: Float[np.ndarray, "*T H"]) -> Float[np.ndarray, "*T H"]:
    keys = np.asarray(keys, np.float32)
    return keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
