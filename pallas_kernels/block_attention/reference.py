"""Block attention in plain XLA: a running softmax over blocks of slots (Dao et al. 2022), so that only one block's logits are in memory."""

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..masking import MASKED

BLOCK = 1024
"""Slots taken at a time."""


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
) -> Float[Array, "B S N H"]:
    """Softmax attention of a block of tokens over slots; see the public function."""
    size = pos.shape[-1]
    block = min(BLOCK, size)
    grouped = einops.rearrange(q, "b s (k g) h -> b k g s h", k=k.shape[1])
    bias = jnp.zeros(pos.shape, jnp.float32) if weight is None else jnp.log(jnp.maximum(weight, 1.0))

    def step(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = sums
        at = jnp.minimum(i * block, size - block)  # the last block overlaps the one before
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
    _, total, out = step(only, start) if block == size else jax.lax.fori_loop(0, -(-size // block), step, start)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return einops.rearrange(out, "b k g s h -> b s (k g) h").astype(q.dtype)
