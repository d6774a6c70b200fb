"""How much attention different choices of tokens recall (CateKV, Figure 4)."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from kvjax.analysis.recording import Recorded


def recall(layers: Sequence[Recorded], kept: Bool[np.ndarray, "L K T"]) -> Float[np.ndarray, "L K"]:
    """Share of attention that goes to kept tokens while a text is read on after its prompt, by KV head.

    Averaged over all tokens after the prompt and the query group. All tokens after the prompt count as kept, as in policies
    that choose once.

    Args:
        layers: a whole text as recorded.
        kept: which of the T tokens of its prompt each head keeps (`kvjax.analysis.layers.kept`).

    Raises:
        ValueError: nothing follows the prompt.
    """

    def fixed(layer: int, head: int, queries: np.ndarray, keys: np.ndarray, probs: np.ndarray) -> np.ndarray:
        return np.broadcast_to(kept[layer, head], probs.shape)

    return _recall(layers, kept.shape[-1], fixed)


def top_recall(layers: Sequence[Recorded], prompt: int, budget: int) -> Float[np.ndarray, "L K"]:
    """The most that any `budget` tokens of the prompt recall, chosen again for every query: an upper bound.

    Raises:
        ValueError: nothing follows the prompt.
    """

    def best(layer: int, head: int, queries: np.ndarray, keys: np.ndarray, probs: np.ndarray) -> np.ndarray:
        return _largest(probs, budget)

    return _recall(layers, prompt, best)


def page_recall(
    layers: Sequence[Recorded], prompt: int, budget: int, sinks: int, recent: int, chunk: int = 8
) -> Float[np.ndarray, "L K"]:
    """Recall of the chunks whose keys promise most to each query, besides sinks and the prompt's last tokens.

    A chunk's promise is an upper bound of its products with the query, from the least and the largest key in every channel
    (Quest, Tang et al. 2024), summed over the query group.

    Args:
        budget: tokens of the prompt, sinks and recent ones included.

    Raises:
        ValueError: nothing follows the prompt, or the budget has no room for a chunk.
    """
    remaining = budget - sinks - recent
    if remaining < chunk:
        raise ValueError(f"a budget of {budget} has no room for a chunk of {chunk} besides {sinks + recent} tokens")
    count = max(prompt - sinks - recent, 0) // chunk
    middle = slice(sinks, sinks + count * chunk)

    def promising(layer: int, head: int, queries: np.ndarray, keys: np.ndarray, probs: np.ndarray) -> np.ndarray:
        chunks = keys[middle].reshape(count, chunk, -1)
        low, high = chunks.min(axis=1), chunks.max(axis=1)
        up, down = np.maximum(queries, 0).sum(axis=0), np.minimum(queries, 0).sum(axis=0)  # the group's, [Q, H]
        chosen = np.ones(probs.shape, bool)
        chosen[:, middle] = np.repeat(_largest(up @ high.T + down @ low.T, remaining // chunk), chunk, axis=-1)
        return chosen

    return _recall(layers, prompt, promising)


Choose = Callable[[int, int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From layer, KV head, queries [G, Q, H], the prompt's keys [T, H] and mean attention [Q, T] to the tokens chosen, [Q, T]."""


def _recall(layers: Sequence[Recorded], prompt: int, choose: Choose) -> Float[np.ndarray, "L K"]:
    total, kv_heads, dim = layers[0].k.shape
    if total <= prompt:
        raise ValueError(f"a text of {total} tokens has none after its prompt of {prompt}; record a longer text")
    distance = np.arange(prompt, total)[:, None] - np.arange(total)
    found = np.zeros((len(layers), kv_heads))
    for index, layer in enumerate(layers):
        visible = (distance >= 0) & (distance < (total if layer.window is None else layer.window))
        group = layer.q.shape[1] // kv_heads
        for head in range(kv_heads):
            queries = np.swapaxes(layer.q[prompt:, head * group : (head + 1) * group], 0, 1)
            logits = np.where(visible, queries @ layer.k[:, head].T / np.sqrt(dim), -np.inf)
            probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
            probs = np.mean(probs / probs.sum(axis=-1, keepdims=True), axis=0)
            before, after = probs[:, :prompt], probs[:, prompt:]
            chosen = choose(index, head, queries, layer.k[:prompt, head], before)
            found[index, head] = np.mean(np.sum(before * chosen, axis=-1) + np.sum(after, axis=-1), dtype=np.float64)
    return found


def _largest(values: Float[np.ndarray, "Q M"], count: int) -> Bool[np.ndarray, "Q M"]:
    """The `count` largest of each row, of equal ones the first."""
    order = np.argsort(-values, axis=-1, kind="stable")
    chosen = np.zeros(values.shape, bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=-1)
    return chosen
