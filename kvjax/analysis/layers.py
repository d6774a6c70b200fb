"""How a policy's choice differs between layers, and how much of each layer it loses (ChunkKV, sections 3.3, A.1 and B.1.3).

The three measures are of a prompt as it stands in the cache after prefill. They take a mask of kept tokens, so they speak of
policies that keep tokens as they are; of a merged slot only its newest token counts as kept.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from kvjax import decoding
from kvjax.cache import layer_specs
from kvjax.extras import import_matplotlib
from kvjax.models import Params
from kvjax.policies import Policy
from kvjax.policies.capabilities import as_cache
from kvjax.sampling import Greedy

from .recording import Recorded

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
    policy = policy.bind(params.config)
    policy.validate(len(tokens) + new_tokens)
    specs = layer_specs(params.config, 1, len(tokens), new_tokens, params.dtype)
    rest = jnp.zeros((1,), jnp.uint32), Greedy(), jnp.zeros((0,), jnp.int32)
    state, _ = decoding.prefill(policy, specs, params, *decoding.padded([list(tokens)]), *rest)
    held = np.zeros((len(specs), params.config.num_kv_heads, len(tokens)), bool)
    for mask, spec, layer in zip(held, specs, state.caches, strict=True):
        slots = as_cache(policy.layer(spec), layer)
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


def cache_loss(layers: Sequence[Recorded], kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, " L"]:
    """L1 loss of each layer's cache: the mean absolute difference of its keys and values from those of the full cache.

    What is dropped counts as zero, so that caches of any size compare with the full one entry by entry (the paper names the
    loss without saying how it aligns the two).

    Args:
        layers: the prompt as recorded; may go on beyond the T tokens of `kept`.
    """
    losses = []
    for layer, mask in zip(layers, kept, strict=True):
        both = np.stack([layer.k, layer.v])[:, : mask.shape[-1]]
        losses.append(np.mean(np.abs(both) * ~mask.T[None, :, :, None], dtype=np.float64))
    return np.asarray(losses)


def attention_similarity(layers: Sequence[Recorded], kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, " L"]:
    """Cosine of the angle between attention over the full and over the compressed cache, for the text after a prompt.

    Both are probabilities over all tokens that a query may see; those that were dropped have probability zero. Averaged over
    the queries that follow the prompt, and over query heads.

    Args:
        layers: a whole text as recorded.
        kept: which of the T tokens of its beginning, the prompt, are kept.

    Raises:
        ValueError: nothing follows the prompt.
    """
    prompt, total = kept.shape[-1], len(layers[0].k)
    if total <= prompt:
        raise ValueError(f"a text of {total} tokens has none after its prompt of {prompt}; record a longer text")
    similar = []
    for layer, mask in zip(layers, kept, strict=True):
        dim, kv_heads = layer.k.shape[2], layer.k.shape[1]
        distance = np.arange(prompt, total)[:, None] - np.arange(total)
        visible = (distance >= 0) & (distance < (total if layer.window is None else layer.window))
        present = np.concatenate([mask, np.ones((kv_heads, total - prompt), bool)], axis=-1)
        cosines = []
        for head, keys in enumerate(np.swapaxes(layer.k, 0, 1)):
            group = layer.q.shape[1] // kv_heads
            queries = np.swapaxes(layer.q[prompt:, head * group : (head + 1) * group], 0, 1)
            logits = np.where(visible, queries @ keys.T / np.sqrt(dim), -np.inf)
            probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
            # Both are the same numbers but for a factor, which a cosine does not see, and the zeros.
            whole, left = (np.sqrt(np.sum(np.square(p), axis=-1)) for p in (probs, probs * present[head]))
            cosines.append(left / whole)
        similar.append(np.mean(cosines, dtype=np.float64))
    return np.asarray(similar)


def draw_similarity(similarity: Mapping[str, Float[np.ndarray, "L L"]]) -> "Figure":
    """Heat maps of `jaccard`, one a policy, to one scale (Figures 2 and 7 to 15).

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


def draw_layers(values: Mapping[str, Float[np.ndarray, " L"]], measure: str) -> "Figure":
    """A line a policy over the layers, for `cache_loss` or `attention_similarity` (Figure 4).

    Args:
        values: a value a layer, by policy.
        measure: what the values are, with their unit; the axis says so.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    figures, _ = import_matplotlib()
    if not values:
        raise ValueError("no values to draw; give at least one policy's")
    figure = figures.Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    for (name, line), marker in zip(values.items(), "os^Dv<>PX*" * len(values), strict=False):
        panel.plot(np.arange(len(line)), line, marker=marker, markersize=4, linewidth=1.2, label=name)
    panel.set_xlabel("layer")
    panel.set_ylabel(measure)
    panel.legend(frameon=False, fontsize=9)
    return figure
