"""Decode attention in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..masking import MASKED
from ..rotary import DeferredRope, heads_of, parts_of, rotate_halves
from .types import Attended, Rotation


def decode_attention(
    q: Float[Array, "B N H"] | DeferredRope,
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
    rotation: Rotation | None = None,
    probs: bool = False,
) -> Attended:
    """Softmax attention of rotated queries over cache slots; see the public function."""
    q = heads_of(q) if rotation is None else rotation.queries(parts_of(q)[0])
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    live = weight > 0
    keys = k if rotation is None else _rotated(k, rotation)
    logits = jnp.einsum("bkgh,bkch->bkgc", grouped, keys, preferred_element_type=jnp.float32) * scale
    bias = jnp.log(jnp.where(live, weight, 1.0))
    logits = jnp.where(live[:, :, None], logits + bias[:, :, None], MASKED)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    unnormalised = jnp.where(live[:, :, None], jnp.exp(logits - top), 0.0)
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    share = unnormalised / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bkgc,bkch->bkgh", share.astype(v.dtype), values, preferred_element_type=jnp.float32)
    logsumexp = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return Attended(
        out.reshape(batch, heads, dim).astype(q.dtype),
        logsumexp.reshape(batch, heads),
        jnp.mean(share, axis=2) if probs else None,
    )


def _rotated(k: Float[Array, "B K C H"], rotation: Rotation) -> Float[Array, "B K C H"]:
    cos, sin = (jnp.take(table, rotation.place, axis=0, mode="clip") for table in rotation.tables())
    return rotate_halves(k, cos, sin)
