"""Decode attention in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..masking import MASKED


def decode_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    weight: Float[Array, "B K C"],
    *,
    scale: float,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K C"]]:
    """Softmax attention over cache slots, each counted `weight` times.

    Query head n reads KV head n // (N / K). A slot of weight w contributes like w equal tokens: `log(w)` is added to its
    logit (Chelsea's degree bias); weight 0 is a free slot, whose contents, NaN included, cannot reach the output.

    Args:
        q: queries, rotated.
        k, v: the cache, keys rotated.
        weight: multiplicity of each slot, 0 where free.
        scale: factor on the logits, usually H ** -0.5.

    Returns:
        The attended values in the dtype of `q`, and each slot's probability in float32, averaged over the query heads of
        its group (H2O, TOVA and TreeKV score slots with it; unused, it costs nothing under jit).
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    live = weight > 0
    logits = jnp.einsum("bkgh,bkch->bkgc", grouped, k, preferred_element_type=jnp.float32) * scale
    bias = jnp.log(jnp.where(live, weight, 1.0))
    logits = jnp.where(live[:, :, None], logits + bias[:, :, None], MASKED)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    unnormalised = jnp.where(live[:, :, None], jnp.exp(logits - top), 0.0)
    probs = unnormalised / jnp.maximum(jnp.sum(unnormalised, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    values = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bkgc,bkch->bkgh", probs.astype(v.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(batch, heads, dim).astype(q.dtype), jnp.mean(probs, axis=2)
