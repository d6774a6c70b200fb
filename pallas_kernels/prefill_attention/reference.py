"""XLA reference of `prefill_attention`, `block_attention` and `partial_block_attention`: causal attention.

`Op` in `api.py` calls it if no kernel supports the case. The kernels must match it up to rounding. Its memory is
proportional to T instead of T².

A short prompt is one masked softmax. A longer one is split into query blocks. Each loops over the key blocks up to its
own with a running softmax (Milakov & Gimelshein 2018; FlashAttention). No T × T array exists, and blocks above the
diagonal are not computed.
"""

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..masking import MASKED
from ..sinks import with_sinks
from .types import Run, Stripes

BLOCK = 256
"""Tokens per query or key block: the fastest on 2 CPU cores (`benchmarks/results/prefill-attention.json`)."""

SLOTS = 1024
"""Slots that `block_attention` processes at a time."""


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention; see the public function."""
    batch, length, heads, dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim)
    sinks = sinks if sinks is None else sinks.reshape(grouped.shape[2:4])
    if length <= BLOCK:
        pos = jnp.arange(length, dtype=jnp.int32)
        out = _normalised(*_block(grouped, k, v, _visible(pos, pos, window), scale), sinks)
    else:
        out = _blockwise(grouped, k, v, scale, window, sinks)
    return out.astype(q.dtype).reshape(q.shape)


def _normalised(top: Array, total: Array, acc: Array, sinks: Float[Array, "K G"] | None) -> Float[Array, "B T K G H"]:
    out = acc / total[..., None]
    return out if sinks is None else with_sinks(out, top + jnp.log(total), sinks)


def _visible(q_pos: Int[Array, " Q"], k_pos: Int[Array, " S"], window: int | None) -> Bool[Array, "Q S"]:
    distance = q_pos[:, None] - k_pos[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _block(q: Array, k: Array, v: Array, visible: Array, scale: float) -> tuple[Array, Array, Array]:
    """Return the maximum logit, the sum of exponentials and the unnormalised values of one query block over one key
    block.
    """
    logits = jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(visible[None, :, None, None], logits, MASKED)
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - top[..., None])
    acc = jnp.einsum("bqkgs,bskh->bqkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return top, jnp.sum(weights, axis=-1), acc


def _blockwise(
    q: Array, k: Array, v: Array, scale: float, window: int | None, sinks: Float[Array, "K G"] | None
) -> Float[Array, "B T K G H"]:
    length = q.shape[1]
    pad = -length % BLOCK
    q, k, v = (jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v))
    offsets = jnp.arange(BLOCK, dtype=jnp.int32)

    def attend(i: Array) -> Array:
        """Attend with one query block to the key blocks that it can see."""
        rows = jax.lax.dynamic_slice_in_dim(q, i * BLOCK, BLOCK, axis=1)

        def fold(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            keys = jax.lax.dynamic_slice_in_dim(k, j * BLOCK, BLOCK, axis=1)
            values = jax.lax.dynamic_slice_in_dim(v, j * BLOCK, BLOCK, axis=1)
            new = _block(rows, keys, values, _visible(i * BLOCK + offsets, j * BLOCK + offsets, window), scale)
            return _merge(carry, new)

        first = jnp.zeros((), jnp.int32) if window is None else jnp.maximum(0, (i * BLOCK - window + 1) // BLOCK)
        shape = rows.shape
        start = (jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1]), jnp.zeros(shape))
        top, total, acc = jax.lax.fori_loop(first, i + 1, fold, start)
        return _normalised(top, total, acc, sinks)

    blocks = jax.lax.map(attend, jnp.arange(q.shape[1] // BLOCK, dtype=jnp.int32))
    batch, _, kv_heads, group, dim = q.shape
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, -1, kv_heads, group, dim)[:, :length]


def _merge(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    top = jnp.maximum(a[0], b[0])
    scale_a, scale_b = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a[..., None] + b[2] * scale_b[..., None]


def block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None,
    run: Run | None = None,
) -> Float[Array, "B S N H"]:
    """Softmax attention of a block of tokens over slots; see the public function."""
    return partial_block_attention(q, k, v, q_pos, pos, weight, scale=scale, window=window)[0]


def partial_block_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B S"],
    pos: Int[Array, "B K T"],
    weight: Float[Array, "B K T"] | None = None,
    *,
    scale: float,
    window: int | None,
    run: Run | None = None,
    stripes: Stripes | None = None,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N"]]:
    """Also return the log-sum-exp; see the public function.

    A running softmax over blocks of slots keeps only one block's logits in memory.
    """
    size = pos.shape[-1]
    block = min(SLOTS, size)
    grouped = einops.rearrange(q, "b s (k g) h -> b k g s h", k=k.shape[1])
    bias = jnp.zeros(pos.shape, jnp.float32) if weight is None else jnp.log(jnp.maximum(weight, 1.0))

    def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = sums
        at = jnp.minimum(i * block, size - block)  # the last block overlaps the previous one
        keys, values, places, extra = (jax.lax.dynamic_slice_in_dim(x, at, block, axis=2) for x in (k, v, pos, bias))
        live = (places >= 0) & (at + jnp.arange(block, dtype=jnp.int32) >= i * block)
        distance = q_pos[:, None, :, None] - places[:, :, None]
        seen = live[:, :, None] & (distance >= 0)
        if window is not None:
            seen &= distance < window
        seen = seen[:, :, None]
        logits = jnp.einsum("bkgsh,bkth->bkgst", grouped, keys, preferred_element_type=jnp.float32) * scale
        logits = jnp.where(seen, logits + extra[:, :, None, None], MASKED)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        share = jnp.where(seen, jnp.exp(logits - higher[..., None]), 0.0)
        values = jnp.where(live[..., None], values, jnp.zeros((), values.dtype))
        added = jnp.einsum("bkgst,bkth->bkgsh", share.astype(values.dtype), values, preferred_element_type=jnp.float32)
        kept = jnp.exp(top - higher)
        return higher, total * kept + jnp.sum(share, axis=-1), out * kept[..., None] + added

    shape = grouped.shape[:-1]
    start = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(grouped.shape, jnp.float32)
    only = jnp.zeros((), jnp.int32)
    top, total, out = step(only, start) if block == size else jax.lax.fori_loop(0, -(-size // block), step, start)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    # The logarithm of 0 has no derivative, and `sinks` give the log-sum-exp one.
    logsumexp = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    out = einops.rearrange(out, "b k g s h -> b s (k g) h").astype(q.dtype)
    return out, einops.rearrange(logsumexp, "b k g s -> b s (k g)")
