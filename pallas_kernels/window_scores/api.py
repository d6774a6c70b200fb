"""The public function: who observes, and the choice of who computes it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..op import Implementation, Op
from .types import Observers

_SCORES = Op("window_scores", __name__, gpu=("pallas_triton",), tpu=("pallas_mosaic_tpu",))
_PRODUCTS = Op("mean_products", __name__)


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
