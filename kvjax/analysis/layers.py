"""How a policy's selection differs between layers (ChunkKV, sections 3.3 and B.1.3).

The selection is a mask of the tokens that are in the cache after prefill. It therefore fits policies that keep tokens
unchanged. Of a merged slot, only the latest token counts as kept.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Bool, Float

from kvjax._util.extras import import_matplotlib
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.runtime.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def kept(params: Params, tokens: Sequence[int], policy: Policy, new_tokens: int = 1) -> Bool[np.ndarray, "L K T"]:
    """Tokens of a prompt that each KV head of each cached layer keeps after prefill.

    Args:
        params: the model.
        tokens: token ids of the prompt.
        policy: the policy.
        new_tokens: number of tokens that will follow, which fractional budgets count.

    Raises:
        ValueError: the prompt is empty.
        PolicyError: the policy does not support a sequence of this length.

    Example:
        >>> from kvjax.analysis.layers import kept
        >>> held = kept(params, [5, 9, 2] * 8, kvjax.StreamingLLM(budget=6, sinks=2))
        >>> held.shape, np.flatnonzero(held[0, 0]).tolist()  # layers, KV heads, tokens
        ((2, 2, 24), [0, 1, 20, 21, 22, 23])
    """
    if not len(tokens):
        raise ValueError("the prompt is empty; give at least one token")
    engine = Engine(params, policy, prompt_len=len(tokens), max_new_tokens=new_tokens, mixed=False)
    state, _ = engine.prefill([list(tokens)])
    held = np.zeros((len(params.config.cached), params.config.num_kv_heads, len(tokens)), bool)
    for mask, slots in zip(held, engine.slots(state), strict=True):
        pos, live = (np.asarray(x)[0] for x in jax.device_get((slots.pos, slots.live)))
        for head, places, full in zip(mask, pos, live, strict=True):
            head[places[full]] = True
    return held


def jaccard(kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, "L L"]:
    """Jaccard similarity of layers: tokens kept by both over tokens kept by either, averaged over KV heads (Figure 2).

    The paper uses only the first head, which is `kept[:, :1]`.

    Example:
        >>> from kvjax.analysis.layers import jaccard
        >>> kept = np.asarray([[[True, True, False]], [[False, True, True]]])  # layers, KV heads, tokens
        >>> jaccard(kept).round(2).tolist()
        [[1.0, 0.33], [0.33, 1.0]]
    """
    marks = kept.astype(np.float64)
    both = np.einsum("akt,bkt->abk", marks, marks)
    size = marks.sum(axis=-1)
    either = size[:, None] + size[None] - both
    return np.mean(np.where(either > 0, both / np.maximum(either, 1), 1.0), axis=-1)


def neighbours(similarity: Float[np.ndarray, "L L"]) -> float:
    """Mean similarity of adjacent layers (Table 2).

    Raises:
        ValueError: there is only one layer.

    Example:
        >>> from kvjax.analysis.layers import neighbours
        >>> neighbours(np.asarray([[1.0, 0.5], [0.5, 1.0]], np.float32))
        0.5
    """
    if len(similarity) < 2:
        raise ValueError(f"{len(similarity)} layer has no neighbours; give the similarities of two or more")
    return float(np.mean(np.diagonal(similarity, offset=1)))


def draw_similarity(similarity: Mapping[str, Float[np.ndarray, "L L"]]) -> "Figure":
    """Heat maps of `jaccard`, one per policy, with a common scale (Figures 2 and 7 to 15).

    Args:
        similarity: matrices by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.

    Example:
        >>> from kvjax.analysis.layers import draw_similarity, jaccard, kept
        >>> held = kept(params, [5, 9, 2] * 8, kvjax.StreamingLLM(budget=6, sinks=2))
        >>> figure = draw_similarity({"StreamingLLM": jaccard(held)})
        >>> len(figure.axes)  # the map and its scale
        2
    """
    figures, _ = import_matplotlib()
    if not similarity:
        raise ValueError("no similarity to draw; give at least one")
    figure = figures.Figure(figsize=(1.2 + 3.4 * len(similarity), 3.9), layout="constrained")
    panels = figure.subplots(1, len(similarity), sharex=True, sharey=True, squeeze=False)[0]
    image = None
    for panel, (title, matrix) in zip(panels, similarity.items(), strict=True):
        image = panel.imshow(matrix, origin="lower", interpolation="nearest", cmap="viridis_r", vmin=0, vmax=1)
        panel.set_title(f"{title}\nadjacent layers {neighbours(matrix):.2f}", fontsize=10)
        panel.set_xlabel("layer")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="Jaccard similarity of kept tokens", fraction=0.05, pad=0.02)
    return figure
