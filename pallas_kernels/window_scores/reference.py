"""XLA reference of `window_scores`, and `mean_products`, which has no kernel.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must match it up to rounding. `attention_mass` has
no reference of its own: `api.py` sums window scores.

Tokens are processed in blocks. The keys are read twice: first for the maximum and sum of each query's softmax, then for
the probabilities. Each block's probabilities are summed before those of the next block are computed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..masking import MASKED
from .types import Observers, from_first

BLOCK = 512
"""Tokens of a whole prompt that are observed at a time. It divides the padded lengths of longer prompts."""

LOGITS = 2**26
"""Number of logits in memory at a time in chunked prefill. Smaller blocks would be many small matmuls."""


def window_scores(
    observers: Observers,
    k: Float[Array, "B T K H"],
    first: Int[Array, " B"] | None,
    stop: Int[Array, " B"],
    *,
    scale: float,
    sliding_window: int | None,
    chunk: int,
    pos: Int[Array, "B #K T"] | None = None,
) -> Float[Array, "B K M"]:
    """Sum the observers' attention to each chunk of the tokens from `first` to `stop`.

    Args:
        observers: the observing queries.
        k: keys.
        first: first observed token, None for the first of all.
        stop: end of the observed tokens.
        scale, sliding_window, chunk, pos: see the public function.
    """
    batch, length, kv_heads, _ = k.shape
    block = BLOCK if pos is None else max(LOGITS // observers.q[..., 0].size // BLOCK * BLOCK, BLOCK)
    block = -(-min(block, length) // chunk) * chunk
    k = jnp.pad(from_first(k, first), ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    if pos is not None:
        pos = jnp.swapaxes(from_first(jnp.swapaxes(pos, 1, 2), first), 1, 2)
        pos = jnp.pad(pos, ((0, 0), (0, 0), (0, -length % block)), constant_values=-1)
    first = jnp.zeros_like(stop) if first is None else first

    def observe(i: Array) -> tuple[Array, Array]:
        """Return the observers' logits with one block of tokens, and their mask."""
        keys = jax.lax.dynamic_slice_in_dim(k, i * block, block, axis=1)
        place = first[:, None] + i * block + jnp.arange(block, dtype=jnp.int32)
        at = place[:, None] if pos is None else jax.lax.dynamic_slice_in_dim(pos, i * block, block, axis=2)
        distance = observers.pos[:, None, :, None] - at[:, :, None]
        there = (at >= 0) & (place < stop[:, None])[:, None]
        visible = (distance >= 0) & (observers.pos >= 0)[:, None, :, None] & there[:, :, None]
        if sliding_window is not None:
            visible &= distance < sliding_window
        visible = visible[:, :, :, None]
        logits = jnp.einsum("bkwgh,btkh->bkwgt", observers.q, keys, preferred_element_type=jnp.float32) * scale
        return jnp.where(visible, logits, MASKED), visible

    def fold(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = carry
        logits, visible = observe(i)
        peak = jnp.maximum(top, jnp.max(logits, axis=-1))
        weights = jnp.where(visible, jnp.exp(logits - peak[..., None]), 0.0)
        return peak, total * jnp.exp(top - peak) + jnp.sum(weights, axis=-1)

    shape = observers.q.shape[:-1]
    blocks = k.shape[1] // block
    start = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    only = jnp.zeros((), jnp.int32)  # a loop of one block would compile slowly and compute its logits twice
    top, total = fold(only, start) if blocks == 1 else jax.lax.fori_loop(0, blocks, fold, start)
    if observers.sinks is not None:
        sinks = jnp.broadcast_to(observers.sinks.astype(jnp.float32)[:, None], top.shape)
        top, kept = jnp.maximum(top, sinks), top
        total = total * jnp.exp(kept - top) + jnp.exp(sinks - top)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)

    def scores(i: Array) -> Float[Array, "B K C"]:
        logits, visible = observe(i)
        probs = jnp.where(visible, jnp.exp(logits - top[..., None]), 0.0) / total[..., None]
        given = jnp.mean(probs, axis=3).reshape(*shape[:3], -1, chunk)
        return jnp.sum(jnp.max(given, axis=-1), axis=2)

    if blocks == 1:
        found = scores(only)
    else:
        found = jnp.moveaxis(jax.lax.map(scores, jnp.arange(blocks, dtype=jnp.int32)), 0, 2)
    return found.reshape(batch, kv_heads, -1)[..., : -(-length // chunk)]


def mean_products(
    observers: Observers, k: Float[Array, "B T K H"], lengths: Int[Array, " B"], *, scale: float
) -> Float[Array, "B K T"]:
    """Return the mean of q · k · scale over the window's queries, for each token: the product with the mean query."""
    observed = jnp.where((observers.pos >= 0)[:, None, :, None, None], observers.q, jnp.zeros((), observers.q.dtype))
    count = jnp.maximum(observers.size, 1).astype(jnp.float32)[:, None, None]
    query = jnp.sum(jnp.mean(observed.astype(jnp.float32), axis=3), axis=2) / count
    products = jnp.einsum("bkh,btkh->bkt", query, k.astype(jnp.float32)) * scale
    return jnp.where((jnp.arange(k.shape[1], dtype=jnp.int32) < lengths[:, None])[:, None], products, 0.0)
