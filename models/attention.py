"""Attention of one layer around the cache: projections to heads, and attention without a cache."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerSpec, PromptKV
from kvjax.config import AttentionConfig, Rope
from kvjax.pallas_kernels import Norm, head_norms, prefill_attention, projection

from .layer import Layer, biased
from .params import Attention


class Heads(NamedTuple):
    """Projections of a layer's input.

    Attributes:
        q, k, v: unrotated queries and keys, and values.
        gate: logits of the factors on the outputs of all heads, None for a layer that is not gated.
    """

    q: Float[Array, "... N H"]
    k: Float[Array, "... K H"]
    v: Float[Array, "... K H"]
    gate: Float[Array, "... A"] | None = None


def heads_of(layer: Layer, x: Float[Array, "... D"], pos: Int[Array, "..."]) -> Heads:
    """Heads of a layer with input `x`, whose tokens are at positions `pos`."""
    p = _params(layer)
    norm = layer.maybe_norm(layer.params.attn_norm)
    return _split(layer, projection(x, p.q, p.k, p.v, norm=norm, biases=_biases(p)), pos)


def split_heads(layer: Layer, products: Sequence[Array], pos: Int[Array, "..."]) -> Heads:
    """Split products of the q, k and v matrices into heads, with biases, norms and query factors if the layer has them."""
    return _split(layer, [biased(y, b) for y, b in zip(products, _biases(_params(layer)), strict=True)], pos)


def _split(layer: Layer, products: Sequence[Array], pos: Int[Array, "..."]) -> Heads:
    """Do the same for products that have their biases."""
    p, (q, k, v) = _params(layer), products
    q, gate = _queries(layer, q)
    k = _heads(layer, k, p.k_norm)
    if (norms := _norms_of_heads(layer)) is not None:
        q, k = head_norms(q, k, *norms)
    return Heads(_scaled(layer, q, pos), k, _heads(layer, v), gate)


def queries_ahead(
    previous: Layer, layer: Layer, x: Float[Array, "... D"], pos: Int[Array, "..."]
) -> Float[Array, "... N H"]:
    """Approximate queries of a layer, computed from the attention input of the previous layer, whose residual stream is `x`."""
    p, norm = _params(layer), previous.maybe_norm(previous.params.attn_norm)
    (product,) = projection(x, p.q, norm=norm, biases=[p.q_bias])
    (q, _), norms = _queries(layer, product), _norms_of_heads(layer)
    return _scaled(layer, q if norms is None else norms[0](q), pos)


def prompt_attention(spec: LayerSpec, prompt: PromptKV) -> Float[Array, "B T _ H"]:
    """Attention over a whole prompt. Devices with the same KV heads split the query heads, if the split is even."""
    shard, group = spec.shard, spec.num_heads // spec.num_kv_heads
    q, k, v, sinks = prompt.q_rotated, prompt.k_rotated, prompt.v, prompt.sinks
    own, part = divmod(spec.num_heads, shard.same_heads)
    if shard.same_heads > 1 and not part and (own % group == 0 or group % own == 0):
        first = shard.same_heads_index() * own
        q = jax.lax.dynamic_slice_in_dim(q, first, own, axis=2)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first // group, max(own // group, 1), axis=2) for x in (k, v))
        sinks = sinks if sinks is None else jax.lax.dynamic_slice_in_dim(sinks, first, own)
    return prefill_attention(q, k, v, scale=spec.scale, window=spec.window, sinks=sinks)


def causal_attention(
    config: AttentionConfig, rope: Rope, q: Array, k: Array, v: Array, sinks: Float[Array, " N"] | None = None
) -> Float[Array, "B T N H"]:
    """Causal attention without a cache, of unrotated q [B, T, N, H] and k, v [B, T, K, H]."""
    pos = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None]
    q, k = rope.rotate(q, pos), rope.rotate(k, pos)
    return prefill_attention(q, k, v, scale=config.logit_scale, window=config.window, sinks=sinks)


def _queries(layer: Layer, product: Array) -> tuple[Float[Array, "... N H"], Float[Array, "... A"] | None]:
    """Heads of queries, before norms of each head, and the gate of a gated layer."""
    p, mixer = _params(layer), layer.config.attention
    h, gate = product, None
    if mixer.gated:
        both = h.reshape(*h.shape[:-1], -1, 2, mixer.head_dim)
        h, gate = (both[..., i, :].reshape(*h.shape[:-1], -1) for i in range(2))
    return _heads(layer, h, p.q_norm), gate


def _heads(layer: Layer, h: Array, norm: Array | None = None) -> Float[Array, "... N H"]:
    """Heads with a norm over all of them, but before norms of each head."""
    mixer = layer.config.attention
    if norm is not None and mixer.joint_qk_norm:
        h = layer.norm(norm)(h)
    return h.reshape(*h.shape[:-1], -1, mixer.head_dim)


def _norms_of_heads(layer: Layer) -> tuple[Norm, Norm] | None:
    """Norms of each head of queries and keys, None if there are none."""
    p = _params(layer)
    if p.q_norm is None or p.k_norm is None or layer.config.attention.joint_qk_norm:
        return None
    return layer.norm(p.q_norm), layer.norm(p.k_norm)


def _scaled(layer: Layer, q: Float[Array, "... N H"], pos: Int[Array, "..."]) -> Float[Array, "... N H"]:
    """Queries times the factor of their positions, if the layer has one."""
    mixer = layer.config.attention
    if mixer.query_period is None:
        return q
    factor = 1.0 + mixer.query_growth * jnp.log1p((pos // mixer.query_period).astype(jnp.float32))
    return q * factor.astype(q.dtype)[..., None, None]


def _biases(p: Attention) -> tuple[Array | None, ...]:
    return p.q_bias, p.k_bias, p.v_bias


def _params(layer: Layer) -> Attention:
    assert isinstance(layer.params.attn, Attention)
    return layer.params.attn
