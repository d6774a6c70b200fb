"""How a policy's choice differs between layers (ChunkKV, sections 3.3 and B.1.3).

That is measured on a prompt as it stands in the cache after prefill, by a mask of kept tokens, so it speaks of policies that
keep tokens as they are; of a merged slot only its newest token counts as kept.
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
    """Which tokens of a prompt each KV head of each layer holds after prefill.

    Args:
        new_tokens: how many tokens are to follow, which fractional budgets count.

    Raises:
        ValueError: the prompt is empty.
        PolicyError: the policy cannot work with a sequence of this length.
    """
    if not len(tokens):
        raise ValueError("the prompt is empty; give at least one token")
    engine = Engine(params, policy, prompt_len=len(tokens), max_new_tokens=new_tokens)
    state, _ = engine.prefill([list(tokens)])
    held = np.zeros((len(engine.specs), params.config.num_kv_heads, len(tokens)), bool)
    for mask, slots in zip(held, engine.slots(state), strict=True):
        pos, live = (np.asarray(x)[0] for x in jax.device_get((slots.pos, slots.live)))
        for head, places, full in zip(mask, pos, live, strict=True):
            head[places[full]] = True
    return held


def jaccard(kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, "L L"]:
    """Similarity of two layers' choices: tokens kept by both over tokens kept by either, averaged over KV heads (Figure 2).

    The paper takes the first head alone: pass `kept[:, :1]`.
    """
    marks = kept.astype(np.float64)
    both = np.einsum("akt,bkt->abk", marks, marks)
    size = marks.sum(axis=-1)
    either = size[:, None] + size[None] - both
    return np.mean(np.where(either > 0, both / np.maximum(either, 1), 1.0), axis=-1)


def neighbours(similarity: Float[np.ndarray, "L L"]) -> float:
    """Mean similarity of adjacent layers (Table 2).

    Raises:
        ValueError: there is one layer only.
    """
    if len(similarity) < 2:
        raise ValueError(f"{len(similarity)} layer has no neighbours; give the similarities of two or more")
    return float(np.mean(np.diagonal(similarity, offset=1)))


def draw_similarity(similarity: Mapping[str, Float[np.ndarray, "L L"]]) -> "Figure":
    """Heat maps of `jaccard`, one per policy, to one scale (Figures 2 and 7 to 15).

    Args:
        similarity: matrices by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
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
