"""Public functions: they select the observing queries. Each `Op` picks a kernel or XLA."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from .types import Observers

_SCORES = Op("window_scores", __name__, gpu=("window_scores_pallas_triton",), tpu=("window_scores_pallas_mosaic_tpu",))
_PRODUCTS = Op("mean_products", __name__)
_MASS = Op("attention_mass", __name__, gpu=(".hopper.attention_mass",))

QUERIES = 64
"""Queries of a prompt that `attention_mass` processes at a time without a kernel: 64 x T probabilities per head."""

QUERIES_OF_BLOCK = 1024
"""The same number for chunked prefill, where a block has few keys."""


def window_scores(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    window: int,
    scale: float,
    sliding_window: int | None = None,
    pos: Int[Array, "B #K T"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    kind: Literal["softmax", "logits"] = "softmax",
    middle: tuple[Int[Array, " B"], Int[Array, " B"]] | None = None,
    chunk: int = 1,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K M"]:
    """Attention that each token receives from the last `window` queries, averaged over those queries and the query
    group.

    This is the observation window of SnapKV (Li et al. 2024, section 3), which ChunkKV, TreeKV and CateKV use too. A
    sequence shorter than the window is averaged over all its queries. No array of size queries × tokens exists. Scores
    only select tokens, so that they have no gradient.

    Args:
        q, k: rotated queries and keys of a right-padded prompt.
        lengths: tokens per sequence; with `pos`, number of slots up to its end.
        window: number of observing queries.
        scale: factor on the logits.
        sliding_window: sliding attention window of the layer in tokens, if it has one.
        pos: position of the token in each slot, in order, and -1 for free slots; by default 0 to T - 1. With `pos`,
            there can be fewer queries than keys: the S queries are those of the last S slots.
        sinks: logit of each query head's attention sink, which is in the denominator of every softmax (gpt-oss). XLA
            computes this case.
        kind: "softmax" averages causal attention probabilities. "logits" averages q · k · scale of every observer with
            every token, including later tokens and those outside the sliding window (ChunkKV as printed).
        middle: first observed token and number of observed tokens of each sequence. Attention is then restricted to
            these, without sinks, and the first score is that of the first of them.
        chunk: tokens per score. For more than one, each query's contribution to a chunk, averaged over the group, is
            its maximum over the chunk's tokens.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        One float32 score for each of M = ⌈T / chunk⌉ chunks, zero for chunks without a token.

    Raises:
        ValueError: `middle` or `chunk` was given with kind="logits".
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> q, k, lengths = prompt.q_rotated, prompt.k_rotated, prompt.lengths
        >>> scores = kvjax.pallas_kernels.window_scores(q, k, lengths, window=2, scale=0.5)
        >>> scores.shape, round(scores.sum().item(), 3)  # rows, KV heads, tokens
        ((1, 1, 6), 1.0)
    """
    if kind == "logits" and (middle is not None or chunk != 1):
        raise ValueError(f"window_scores: kind='logits' does not support chunk={chunk} or `middle`. Use kind='softmax'")
    q, k = jax.lax.stop_gradient((q, k))
    sinks = None if middle is not None else jax.lax.stop_gradient(sinks)
    observers = Observers.of(q, lengths, window, k.shape[2], pos, sinks)
    if kind == "logits":
        return _PRODUCTS(observers, k, lengths, scale=scale, implementation=implementation, interpret=interpret)
    begin, count = (None, lengths) if middle is None else middle
    stop = lengths if begin is None else jnp.minimum(begin + count, lengths)
    options = {"pos": pos, "scale": scale, "sliding_window": sliding_window, "chunk": chunk}
    total = _SCORES(observers, k, begin, stop, **options, implementation=implementation, interpret=interpret)
    return total / jnp.maximum(observers.size, 1).astype(jnp.float32)[:, None, None]


def attention_mass(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: int | None = None,
    pos: Int[Array, "B #K T"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K T"]:
    """Attention that each token of a prompt receives from all queries together, averaged over the query group.

    This is the sum of causal softmax probabilities, the score of H2O (Zhang et al. 2023). No array of size S x T
    exists. Scores only select tokens, so that they have no gradient.

    Args:
        q, k, lengths, scale, sliding_window: as for `window_scores`.
        pos: as for `window_scores`. Each head's kept tokens must be contiguous and end directly before the queries'
            slots.
        sinks: as for `window_scores`.
        implementation: "auto" picks the device's Pallas kernel if it supports the case, else XLA; see
            `kvjax.pallas_kernels.op`.
        interpret: run the Pallas kernel in interpret mode, on any device.

    Returns:
        Sums in float32, zero for slots without a token.

    Raises:
        Unsupported: the requested implementation does not support this case.

    Example:
        >>> mass = kvjax.pallas_kernels.attention_mass(prompt.q_rotated, prompt.k_rotated, prompt.lengths, scale=0.5)
        >>> mass.shape, round(mass.sum().item(), 3)  # each of six queries gives 1
        ((1, 1, 6), 6.0)
    """
    q, k = jax.lax.stop_gradient((q, k))
    size = q.shape[1]
    before = k.shape[1] - size
    queries = lengths - before
    first = jnp.zeros((q.shape[0], k.shape[2]), jnp.int32)
    if pos is not None:
        first += before - jnp.sum(pos[:, :, :before] >= 0, axis=-1, dtype=jnp.int32)
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "sinks": sinks}
    kernel = _MASS.kernel(q, k, first, queries, **options, implementation=implementation, interpret=interpret)
    if kernel is not None:
        return kernel(q, k, first, queries, **options)
    at_once = QUERIES if pos is None else min(QUERIES_OF_BLOCK, size)
    options |= {"pos": pos, "implementation": implementation}

    def add(i: Int[Array, ""], mass: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """Add the attention of the next queries, counted from each sequence's end."""
        left = jnp.maximum(queries - i * at_once, 0)
        mean = window_scores(q, k, left + before, window=at_once, **options)
        return mass + mean * jnp.minimum(left, at_once).astype(jnp.float32)[:, None, None]

    start = jnp.zeros((q.shape[0], k.shape[2], k.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, -(-size // at_once), add, start)
