"""Wavelet analysis of how tokens' contributions to the output vary with position (TreeKV, sections 3.2 and 3.3).

At the last token of a text, a head's signal is a(j) v(j), attention times value, over positions j. Its Haar components
show how much neighbouring tokens differ (level 1), neighbouring pairs (level 2), fours, and so on, and where.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from kvjax._util.extras import import_matplotlib

from .recording import Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HALF = np.sqrt(2) / 2


def decompose(signal: Float[np.ndarray, "T ..."], levels: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Multi-level Haar decomposition along the first axis.

    Returns:
        Approximation coefficients A of the last level, and detail coefficients D of levels 1, 2, …, each half as long
            as the previous one.

    Raises:
        ValueError: the length is not a multiple of 2^levels.

    Example:
        >>> from kvjax.analysis.wavelet import decompose
        >>> approximation, (detail,) = decompose(np.asarray([1.0, 3.0, 2.0, 2.0]), levels=1)
        >>> approximation.round(3).tolist(), detail.round(3).tolist()
        ([2.828, 2.828], [-1.414, 0.0])
    """
    if levels < 1 or len(signal) % 2**levels:
        raise ValueError(f"{levels} levels need a length that is a multiple of {2**levels}, which {len(signal)} is not")
    approximation, details = signal, []
    for _ in range(levels):
        left, right = approximation[0::2], approximation[1::2]
        approximation, detail = _HALF * (left + right), _HALF * (left - right)
        details.append(detail)
    return approximation, details


def reconstruct(approximation: np.ndarray, detail: np.ndarray) -> np.ndarray:
    """Reconstruct the signal of one level from its coefficients (R in the paper), the inverse of a one-level decomposition.

    Example:
        >>> from kvjax.analysis.wavelet import decompose, reconstruct
        >>> approximation, (detail,) = decompose(np.asarray([1.0, 3.0, 2.0, 2.0]), levels=1)
        >>> reconstruct(approximation, detail).round(3).tolist()
        [1.0, 3.0, 2.0, 2.0]
    """
    pairs = np.stack([_HALF * (approximation + detail), _HALF * (approximation - detail)], axis=1)
    return pairs.reshape(2 * len(detail), *detail.shape[1:])


def components(signal: Float[np.ndarray, "T ..."], levels: int) -> Float[np.ndarray, "W T ..."]:
    """Parts of a signal that come from each level's detail coefficients alone: Rec(D_1), Rec(D_2), …

    Together with the means of blocks of 2^levels they add up to the signal.

    Raises:
        ValueError: as `decompose`.

    Example:
        >>> from kvjax.analysis.wavelet import components
        >>> (part,) = components(np.asarray([1.0, 3.0, 2.0, 2.0]), levels=1)
        >>> part.round(3).tolist()  # differences from the means of pairs
        [-1.0, 1.0, 0.0, 0.0]
    """
    parts = []
    for detail in decompose(signal, levels)[1]:
        part = reconstruct(np.zeros_like(detail), detail)
        while len(part) < len(signal):
            part = reconstruct(part, np.zeros_like(part))
        parts.append(part)
    return np.stack(parts)


def contributions(layer: Recorded) -> Float[np.ndarray, "N T H"]:
    """Contribution of each token to the last token's attention output in every query head: attention times value.

    Example:
        >>> from kvjax.analysis.recording import record
        >>> from kvjax.analysis.wavelet import contributions
        >>> contributions(record(params, [5, 9, 2] * 4)[0]).shape  # query heads, tokens, channels
        (4, 12, 16)
    """
    total, kv_heads, dim = layer.k.shape
    group = layer.q.shape[1] // kv_heads
    keys, values = (np.repeat(np.swapaxes(x, 0, 1), group, axis=0) for x in (layer.k, layer.v))
    logits = np.einsum("nh,nth->nt", layer.q[-1], keys) / np.sqrt(dim)
    if layer.window is not None:
        logits[:, : max(total - layer.window, 0)] = -np.inf
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (probs / probs.sum(axis=-1, keepdims=True))[..., None] * values


def magnitudes(layers: Sequence[Recorded], levels: int = 5) -> Float[np.ndarray, "W T"]:
    """Mean magnitude of each level's component at each position, over all layers, heads and channels (Figure 2).

    Args:
        layers: a recorded text, whose last token's signal is used. (The paper uses the 512th generated token, and
            averages over 2000 texts.)
        levels: number of levels, W.

    Raises:
        ValueError: the text's length is not a multiple of 2^levels.

    Example:
        >>> from kvjax.analysis.recording import record
        >>> from kvjax.analysis.wavelet import magnitudes
        >>> magnitudes(record(params, [5, 9, 2, 7] * 8), levels=3).shape  # levels, tokens
        (3, 32)
    """
    total = np.zeros((levels, len(layers[0].k)))
    for layer in layers:
        signal = np.swapaxes(contributions(layer), 0, 1)
        total += np.abs(components(signal, levels)).mean(axis=(2, 3))
    return total / len(layers)


def draw_magnitudes(magnitude: Float[np.ndarray, "W T"], margin: int = 32) -> "Figure":
    """Line plot of each level over positions (Figure 2).

    Args:
        magnitude: as returned by `magnitudes`.
        margin: number of tokens excluded at both ends, whose attention has another scale.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no position is left to draw.

    Example:
        >>> from kvjax.analysis.wavelet import draw_magnitudes
        >>> figure = draw_magnitudes(np.ones((3, 32)), margin=4)
        >>> len(figure.axes[0].lines)  # levels
        3
    """
    figures, colormaps = import_matplotlib()
    levels, total = magnitude.shape
    if total <= 2 * margin:
        raise ValueError(
            f"{total} positions less {margin} at both ends leave none to draw; give a longer text or lower margin"
        )
    positions = np.arange(margin, total - margin)
    figure = figures.Figure(figsize=(6.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for level, shade in enumerate(colormaps["viridis_r"](np.linspace(0.15, 1, levels))):
        name = f"{level + 1}: differences over {2**level}"
        panel.plot(positions, magnitude[level, positions], color=shade, linewidth=1.2, label=name)
    panel.set_yscale("log")
    panel.set_xlabel("position in tokens")
    panel.set_ylabel("mean magnitude of attention × value")
    panel.legend(title="level, tokens", frameon=False, fontsize=8)
    return figure
