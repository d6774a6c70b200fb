"""Attention weights of chosen layers, as arrays and figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from kvjax._util.extras import import_matplotlib
from kvjax.models import Params

from .recording import record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_weights(
    params: Params, tokens: Sequence[int], layers: Sequence[int], last: int | None = None
) -> dict[int, Float[np.ndarray, "N Q T"]]:
    """Process a text without cache compression, and record the attention weights of some layers.

    The model runs once. Weights take 4 · N · Q · T bytes for each layer: N query heads, Q queries, T tokens.

    Args:
        params: the model.
        tokens: token ids of the text.
        layers: indices of layers, of which those without attention are not counted. Negative ones count from the end.
        last: number of queries, which are the last tokens of the text. By default all tokens.

    Returns:
        Weights by index of the layer. Each row is over the tokens of the text and sums to 1, or to less in a model with
            attention sinks, which take the rest.

    Raises:
        ValueError: the text is empty, a layer does not exist, or `last` is out of range.

    Example:
        >>> from kvjax.analysis.attention import attention_weights
        >>> weights = attention_weights(params, [5, 9, 2] * 4, layers=[0], last=2)
        >>> weights[0].shape  # query heads, queries, tokens
        (4, 2, 12)
    """
    cached, length = params.config.cached, len(tokens)
    count = len(cached)
    if wrong := [layer for layer in layers if not -count <= layer < count]:
        raise ValueError(f"layers: the model has no layer {wrong[0]} with attention. Use {-count} to {count - 1}.")
    queries = length if last is None else last
    if not 0 < queries <= max(length, 1):
        raise ValueError(f"last={last}: the text has {length} tokens. Use 1 to {length}.")
    recorded = record(params, tokens)
    at, positions = np.arange(length - queries, length)[:, None], np.arange(length)
    found: dict[int, Float[np.ndarray, "N Q T"]] = {}
    for layer in layers:
        q, k, _, window = recorded[layer]
        scale = np.float32(params.config.layers[cached[layer]].attention.logit_scale)
        is_seen = positions <= at
        if window is not None:
            is_seen &= positions > at - window
        group = q.shape[1] // k.shape[1]
        logits = np.stack([q[-queries:, n] @ k[:, n // group].T for n in range(q.shape[1])]) * scale
        logits = np.where(is_seen, logits, np.float32(-np.inf))
        sinks = params.layers[cached[layer]].sinks
        if sinks is not None:
            beside = np.broadcast_to(np.asarray(sinks, np.float32)[:, None, None], (*logits.shape[:2], 1))
            logits = np.concatenate([logits, beside], axis=-1)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found[layer % count] = (weights / weights.sum(axis=-1, keepdims=True))[..., :length]
    return found


def draw_attention(weights: Mapping[str, Float[np.ndarray, "Q T"]]) -> "Figure":
    """Heat maps of attention weights, one per head or mean of heads, with a common logarithmic scale.

    Args:
        weights: matrices by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.

    Example:
        >>> from kvjax.analysis.attention import attention_weights, draw_attention
        >>> weights = attention_weights(params, [5, 9, 2] * 4, layers=[0])
        >>> figure = draw_attention({f"head {n}": weights[0][n] for n in range(2)})
        >>> len(figure.axes)  # two maps and their scale
        3
    """
    figures, _ = import_matplotlib()
    if not weights:
        raise ValueError("no attention weights to draw; give at least one matrix")
    figure = figures.Figure(figsize=(1.2 + 3.4 * len(weights), 3.7), layout="constrained")
    panels = figure.subplots(1, len(weights), sharex=True, sharey=True, squeeze=False)[0]
    image = None
    for panel, (title, matrix) in zip(panels, weights.items(), strict=True):
        queries, length = matrix.shape
        image = panel.imshow(
            np.log10(np.maximum(matrix, 1e-4)),
            interpolation="nearest",
            aspect="auto",
            cmap="viridis",
            vmin=-4,
            vmax=0,
            extent=(-0.5, length - 0.5, length - 0.5, length - queries - 0.5),
        )
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("token")
    panels[0].set_ylabel("query")
    figure.colorbar(image, ax=panels, label="log10 of attention weight", fraction=0.05, pad=0.02)
    return figure
