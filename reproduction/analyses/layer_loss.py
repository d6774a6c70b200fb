"""How much of each layer a policy loses (ChunkKV, sections 3.3 and A.1).

Both measures describe the cache of a prompt after prefill. They take a mask of kept tokens (`kvjax.analysis.layers.kept`), so they
are meant for policies that keep tokens unchanged. Of a merged slot only the newest token counts as kept.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from kvjax.analysis.recording import Recorded


def cache_loss(layers: Sequence[Recorded], kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, " L"]:
    """L1 loss of each layer's cache: the mean absolute difference of its keys and values from those of the full cache.

    What is dropped counts as zero, so that caches of any size compare with the full one entry by entry (the paper names the
    loss without saying how it aligns the two).

    Args:
        layers: the recorded prompt; may continue beyond the T tokens of `kept`.
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
