"""The public function: who observes, and the choice of who computes it."""

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
"""Queries of a whole prompt that `attention_mass` takes at a time without a kernel: 64 x T probabilities per head exist at once."""

QUERIES_OF_BLOCK = 1024
"""The same where a text is read in blocks, whose keys are few."""


def window_scores(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    *,
    window: int,
    scale: float,
    sliding_window: int | None = None,
    pos: Int[Array, "B #K T"] | None = None,
    kind: Literal["softmax", "logits"] = "softmax",
    middle: tuple[Int[Array, " B"], Int[Array, " B"]] | None = None,
    chunk: int = 1,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K M"]:
    """How much each row's last `window` queries look at each of its tokens, averaged over those queries and the group.

    The observation window of SnapKV (Li et al. 2024, section 3), used by ChunkKV, TreeKV and CateKV too. A row shorter than
    the window is averaged over the queries that it has. Nothing of the size of queries × tokens is held. What is kept has no gradient,
    so these scores, which tell it, have none.

    Args:
        q, k: rotated queries and keys of a right-padded prompt.
        lengths: tokens in each row; with `pos`, places up to its end.
        window: number of observing queries.
        scale: factor on the logits.
        sliding_window: attention window of the layer in tokens, if it has one.
        pos: position of the token in each place, -1 where there is none, in order; that of a whole prompt by default. With it there may
            be fewer queries than keys, S: those of the last S places, of which alone queries observe.
        kind: "softmax" averages causal attention probabilities; "logits" averages the bare products q · k · scale of every
            observer with every token, later ones and those outside a sliding window included (ChunkKV as printed).
        middle: where the observed tokens begin and how many they are, in each row, instead of all: attention is to them alone, and
            the first score is that of the first of them.
        chunk: tokens to one score. To several, each query, averaged over its group, gives what it gives to the best of them.
        implementation: who computes it, see `kvjax.pallas_kernels.op`.
        interpret: interpret the Pallas kernel that was named, on any device.

    Returns:
        A score in float32 for each of M = ⌈T / chunk⌉ chunks, zero where there is no token.

    Raises:
        ValueError: `middle` or `chunk` was given for bare products.
        Unsupported: an implementation was named that cannot compute this.
    """
    if kind == "logits" and (middle is not None or chunk != 1):
        raise ValueError(f"window_scores: kind='logits' with chunk={chunk} or a middle; these are for 'softmax'")
    q, k = jax.lax.stop_gradient((q, k))
    observers = Observers.of(q, lengths, window, k.shape[2], pos)
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
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "B K T"]:
    """Attention that each token of a prompt gets from all queries together, averaged over the query group.

    Causal softmax probabilities, summed: the score of H2O (Zhang et al. 2023). Nothing of size S x T is held. It tells what is
    kept, and has no gradient.

    Args:
        q, k, lengths, scale, sliding_window: as for `window_scores`.
        pos: as for `window_scores`; the tokens of each head stand up against its last place before the queries', without a gap.
        implementation: who computes it, see `kvjax.pallas_kernels.op`.
        interpret: interpret the Pallas kernel that was named, on any device.

    Returns:
        Sums in float32, zero where there is no token.

    Raises:
        Unsupported: an implementation was named that cannot compute this.
    """
    q, k = jax.lax.stop_gradient((q, k))
    size = q.shape[1]
    before = k.shape[1] - size
    queries = lengths - before
    first = jnp.zeros((q.shape[0], k.shape[2]), jnp.int32)
    if pos is not None:
        first += before - jnp.sum(pos[:, :, :before] >= 0, axis=-1, dtype=jnp.int32)
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window}
    kernel = _MASS.kernel(q, k, first, queries, **options, implementation=implementation, interpret=interpret)
    if kernel is not None:
        return kernel(q, k, first, queries, **options)
    at_once = QUERIES if pos is None else min(QUERIES_OF_BLOCK, size)
    options |= {"pos": pos, "implementation": implementation}

    def add(i: Int[Array, ""], mass: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
        """With the next queries, counted from each row's end."""
        left = jnp.maximum(queries - i * at_once, 0)
        mean = window_scores(q, k, left + before, window=at_once, **options)
        return mass + mean * jnp.minimum(left, at_once).astype(jnp.float32)[:, None, None]

    start = jnp.zeros((q.shape[0], k.shape[2], k.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, -(-size // at_once), add, start)
