"""The transformer's forward pass, as plain functions over a parameter pytree.

One block serves four uses, which differ only in what attention sees: `forward` (every position, no cache), `prefill` (a
prompt in, a cache out), `read_block` (a part of a text in, cache updated) and `decode_step` (one token in, cache updated). The cache is reached through the functions of a policy's
layers alone, so nothing here knows any method.

Layers are unrolled: each has weights and a cache of its own shape, and a scan would copy both (measured on an H200 at the
Llama-3.1-8B shape: 4.94 ms per token unrolled, 17.95 scanned).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax._util.any_rank import any_rank
from kvjax.cache import LayerSpec, Prompt, Shard, Token, TokenBlock
from kvjax.cache.shard import ONE_DEVICE
from kvjax.config import ModelConfig, Rope
from kvjax.pallas_kernels import (
    BlockWeights,
    Matrix,
    Norm,
    QuantizedMatrix,
    fused_decode_block,
    gated_projection,
    lookup,
    prefill_attention,
    projection,
)
from kvjax.policies import capabilities
from kvjax.policies.base import Carry
from kvjax.policies.base import Layer as CacheLayer
from kvjax.policies.capabilities import look_ahead
from kvjax.policies.surroundings import Surroundings

from .params import MLP, Layer, Params

HEAD_BLOCK = 256
"""Positions that go through the vocabulary head at a time when a whole text is scored."""

SMALL_SUM = 16384
"""Numbers that devices add up in float32, whatever the type of the model: 64 KiB take as long to send as 32."""

Attend = Callable[[Array, Array, Array], Array]
"""Attention of one layer: unrotated q [..., N, H] and k, v [..., K, H] in, values [..., N, H] out."""

AttendAt = Callable[[int, Array, Array, Array], Array]
"""Attention of any layer, which comes first."""


@any_rank
def forward(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every position, float32, attending to all tokens before it. Rows may be padded on the right."""
    return _logits(params, hidden(params, tokens))


@any_rank
def token_logprobs(params: Params, tokens: Int[Array, "B T"], shard: Shard = ONE_DEVICE) -> Float[Array, "B T-1"]:
    """Log-probability of each token given those before it, from the second on.

    The same forward pass, but only `HEAD_BLOCK` positions at a time go through the vocabulary head: no [B, T, V] array.
    """
    x = hidden(params, tokens, shard=shard)[:, :-1]
    batch, length, width = x.shape
    pad = -length % HEAD_BLOCK
    blocks = jnp.pad(x, [(0, 0), (0, pad), (0, 0)]).reshape(batch, -1, HEAD_BLOCK, width)
    targets = jnp.pad(tokens[:, 1:], [(0, 0), (0, pad)]).reshape(batch, -1, HEAD_BLOCK)

    def score(block: tuple[Array, Array]) -> Array:
        logits = _logits(params, block[0], shard)
        chosen = jnp.take_along_axis(logits, block[1][..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    scores = jax.lax.map(score, (jnp.moveaxis(blocks, 1, 0), jnp.moveaxis(targets, 1, 0)))
    return jnp.moveaxis(scores, 0, 1).reshape(batch, -1)[:, :length]


@any_rank
def hidden(
    params: Params, tokens: Int[Array, "B T"], attend: AttendAt | None = None, shard: Shard = ONE_DEVICE
) -> Float[Array, "B T D"]:
    """The residual stream after the last layer, each position attending to all before it.

    Args:
        attend: attention to take instead, for studies of what a model needs of it.
        shard: how devices share the model.
    """
    config = params.config
    rope = config.rope.resolve(tokens.shape[1])

    def causal(layer: int, q: Array, k: Array, v: Array) -> Array:
        return _causal(rope, config, config.windows[layer], q, k, v)

    x = _embed(params, tokens, shard)
    for i, layer in enumerate(params.layers):
        x = _block(config, layer, x, partial(attend or causal, i), shard)
    return x


@any_rank
def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Read a right-padded prompt.

    Args:
        lengths: tokens in each row.
        total: tokens that each row will reach with its new ones.
        caches: the policy's functions for each layer.

    Returns:
        Logits of each row's last token (only that position goes through the vocabulary head), and one state per layer.
    """
    config, shard = params.config, caches[0].spec.shard
    x = _embed(params, tokens, shard)
    states: list[Any] = []
    carry: Carry = {}
    for layer, cache in zip(params.layers, caches, strict=True):
        around = partial(_surrounded, config, layer, x, cache)

        def attend(
            q: Array, k: Array, v: Array, cache: CacheLayer[Any] = cache, around: Callable[[Carry], Carry] = around
        ) -> Array:
            nonlocal carry
            spec = cache.spec
            prompt = Prompt.of(spec.rope, q, k, v, lengths, total)
            state, carry = cache.prefill(prompt, around(carry))
            out = _prompt_attention(spec, prompt)
            # Compressed before the model goes on: XLA leaves it for the end otherwise, and keeps all layers' keys and values till then.
            out, state = jax.lax.optimization_barrier((out, state))
            states.append(state)
            return out

        x = _block(config, layer, x, attend, shard)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return _logits(params, last, shard), tuple(states)


@any_rank
def decode_step(
    params: Params,
    states: Sequence[Any],
    token: Int[Array, " B"],
    pos: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Read one token per row, at original position `pos`; logits of the next, and the states with it appended."""
    config, layers, shard = params.config, params.layers, caches[0].spec.shard
    x = _embed(params, token, shard)
    heads = _first_heads(config, layers[0], x)
    updated: list[Any] = []
    carry: Carry = {}
    for i, (layer, cache, state) in enumerate(zip(layers, caches, states, strict=True)):
        new = Token(*heads, pos, cache.spec.rope)
        out, state, carry = cache.attend(cache.append(state, new), new, carry)
        updated.append(state)
        before, out = x, out.reshape(*x.shape[:-1], -1)
        if i + 1 == len(layers):
            x = _rest(config, layer, x, out, shard)
            break
        x, heads = _next_heads(config, layer, layers[i + 1], x, out, shard)
        carry = look_ahead(caches[i + 1], partial(_queries_ahead, params, i + 1, before), pos, carry)
    return _logits(params, x, shard), tuple(updated)


@any_rank
def read_block(
    params: Params,
    states: Sequence[Any],
    tokens: Int[Array, "B S"],
    pos: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Read a block of a text, right-padded, into the caches; what tokens attend to is in `capabilities.ReadsBlocks`.

    Args:
        pos: original position of each row's first token.
        count: tokens in each row; the caches of a row without one stay as they are, and its logits mean nothing.
        total: tokens that each row will reach with its new ones.

    Returns:
        Logits of each row's last token, and the states.
    """
    shard = caches[0].spec.shard
    x = _embed(params, tokens, shard)
    updated: list[Any] = []
    carry: Carry = {}
    for layer, cache, state in zip(params.layers, caches, states, strict=True):
        around = partial(_surrounded, params.config, layer, x, cache)

        def attend(
            q: Array,
            k: Array,
            v: Array,
            cache: CacheLayer[Any] = cache,
            state: Any = state,
            around: Callable[[Carry], Carry] = around,
        ) -> Array:
            nonlocal carry
            block = TokenBlock(q, k, v, pos, count, total, cache.spec.rope)
            out, state, carry = capabilities.read_block(cache, state, block, around(carry))
            out, state = jax.lax.optimization_barrier((out, state))  # see `prefill`
            updated.append(state)
            return out

        x = _block(params.config, layer, x, attend, shard)
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return _logits(params, last, shard), tuple(updated)


def _prompt_attention(spec: LayerSpec, prompt: Prompt) -> Float[Array, "B T _ H"]:
    """Attention of a whole prompt. Of devices with the same KV heads each computes the query heads that its columns multiply, if they are whole."""
    shard, group = spec.shard, spec.num_heads // spec.num_kv_heads
    q, k, v = prompt.q_rotated, prompt.k_rotated, prompt.v
    own, part = divmod(spec.num_heads, shard.same_heads)
    if shard.same_heads > 1 and not part and (own % group == 0 or group % own == 0):
        first = shard.same_heads_index() * own
        q = jax.lax.dynamic_slice_in_dim(q, first, own, axis=2)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first // group, max(own // group, 1), axis=2) for x in (k, v))
    return prefill_attention(q, k, v, scale=spec.scale, window=spec.window)


def _embed(params: Params, tokens: Array, shard: Shard = ONE_DEVICE) -> Array:
    if shard.model == 1:
        return lookup(params.embed, tokens, params.dtype)
    own = params.embed.shape[0]  # the vocabulary is dealt in order
    row = tokens - shard.model_index() * own
    mine = (row >= 0) & (row < own)
    vectors = lookup(params.embed, jnp.where(mine, row, 0), params.dtype)
    return shard.sum_over_model(jnp.where(mine[..., None], vectors, jnp.zeros((), vectors.dtype)))


def _block(
    config: ModelConfig, layer: Layer, x: Float[Array, "... D"], attend: Attend, shard: Shard = ONE_DEVICE
) -> Float[Array, "... D"]:
    """One transformer block: attention and MLP, each normed before (and after, where the family does) and added to `x`."""
    out = attend(*_first_heads(config, layer, x))
    return _rest(config, layer, x, out.reshape(*x.shape[:-1], -1), shard)


def _surrounded(
    config: ModelConfig, layer: Layer, x: Float[Array, "... D"], cache: CacheLayer[Any], carry: Carry
) -> Carry:
    """The carry for a layer that reads `x`, with what is around its attention if it asks for that."""
    if not cache.traits.surroundings:
        return carry
    norm, matrix, shard = Norm(layer.attn_norm, config.norm_eps), layer.attn.o, cache.spec.shard

    def output() -> Float[Array, "N H D"]:
        wide = shard.gather_over_same_heads(
            matrix.dequantized(jnp.float32) if isinstance(matrix, QuantizedMatrix) else matrix
        )
        return wide.T.reshape(-1, config.head_dim, wide.shape[0])

    return Surroundings(lambda: norm(x), output).told(carry)


def _first_heads(config: ModelConfig, layer: Layer, x: Float[Array, "... D"]) -> tuple[Array, Array, Array]:
    """Unrotated q [..., N, H] and k, v [..., K, H] of a layer that reads `x`."""
    p = layer.attn
    return _shaped(config, layer, projection(x, p.q, p.k, p.v, norm=Norm(layer.attn_norm, config.norm_eps)))


def _next_heads(
    config: ModelConfig,
    layer: Layer,
    following: Layer,
    x: Float[Array, "B D"],
    out: Float[Array, "B A"],
    shard: Shard,
) -> tuple[Array, tuple[Array, Array, Array]]:
    """The residual stream after `layer`, whose attention is `out`, and the heads of the `following` layer."""
    p, mlp, after, eps = layer.attn, layer.mlp, following.attn, config.norm_eps
    between = p.o_bias, layer.attn_post_norm, mlp.gate_bias, mlp.up_bias, mlp.down_bias, layer.mlp_post_norm
    if shard.model > 1 or any(a is not None for a in between):  # or devices add up what they have between two matrices
        x = _rest(config, layer, x, out, shard)
        return x, _first_heads(config, following, x)
    norms = Norm(layer.mlp_norm, eps), Norm(following.attn_norm, eps)
    weights = BlockWeights(p.o, norms[0], mlp.gate, mlp.up, mlp.down, norms[1], after.q, after.k, after.v)
    moved = fused_decode_block(out, x, weights)
    return moved.x, _shaped(config, following, [moved.q, moved.k, moved.v])


def _shaped(config: ModelConfig, layer: Layer, products: Sequence[Array]) -> tuple[Array, Array, Array]:
    """A layer's q, k and v by heads, with biases and norms where the family has them."""
    p, (q, k, v) = layer.attn, products
    return _heads(config, q, p.q_bias, p.q_norm), _heads(config, k, p.k_bias, p.k_norm), _heads(config, v, p.v_bias)


def _rest(
    config: ModelConfig,
    layer: Layer,
    x: Float[Array, "... D"],
    out: Float[Array, "... A"],
    shard: Shard = ONE_DEVICE,
) -> Array:
    """The residual stream after a layer whose attention is `out`."""
    p, mlp = layer.attn, layer.mlp
    if out.shape[-1] == config.num_heads // shard.heads * config.head_dim:  # and not this device's columns alone
        out = shard.own_columns(out)
    x = _joined(config, x, out, p.o, p.o_bias, layer.attn_post_norm, shard)
    h = _gated(mlp, x, Norm(layer.mlp_norm, config.norm_eps))
    return _joined(config, x, h, mlp.down, mlp.down_bias, layer.mlp_post_norm, shard)


def _joined(
    config: ModelConfig, x: Array, h: Array, w: Matrix, bias: Array | None, norm: Array | None, shard: Shard
) -> Array:
    """The residual stream `x` with what `w` makes of `h` added."""
    if shard.model > 1:
        exact = (
            x.size <= SMALL_SUM
        )  # each device's part is rounded before they are added up, unless that is no more to send
        (y,) = projection(h, w, dtype=jnp.float32 if exact else x.dtype)
        y = shard.sum_over_model(y).astype(x.dtype)
    elif bias is None and norm is None:
        return projection(h, w, residual=x)[0]
    else:
        (y,) = projection(h, w)
    y = _biased(y, bias)
    return x + (y if norm is None else Norm(norm, config.norm_eps)(y))


def _gated(p: MLP, x: Array, norm: Norm) -> Array:
    if p.gate_bias is None and p.up_bias is None:
        return gated_projection(x, p.gate, p.up, norm=norm)
    gate, up = projection(x, p.gate, p.up, norm=norm)
    return jax.nn.silu(_biased(gate, p.gate_bias)) * _biased(up, p.up_bias)


def _heads(config: ModelConfig, h: Array, bias: Array | None, norm: Array | None = None) -> Float[Array, "... N H"]:
    h = _biased(h, bias).reshape(*h.shape[:-1], -1, config.head_dim)
    return h if norm is None else Norm(norm, config.norm_eps)(h)


def _biased(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def _queries_ahead(params: Params, layer: int, x: Float[Array, "... D"]) -> Float[Array, "... N H"]:
    """The queries that a layer would have for the attention input of the one before it, whose residual stream was `x`."""
    config, p = params.config, params.layers[layer].attn
    (q,) = projection(x, p.q, norm=Norm(params.layers[layer - 1].attn_norm, config.norm_eps))
    return _heads(config, q, p.q_bias, p.q_norm)


def _causal(rope: Rope, config: ModelConfig, window: int | None, q: Array, k: Array, v: Array) -> Array:
    pos = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None]
    scale = config.head_dim**-0.5
    return prefill_attention(rope.rotate(q, pos), rope.rotate(k, pos), v, scale=scale, window=window)


def _logits(params: Params, x: Array, shard: Shard = ONE_DEVICE) -> Array:
    head = params.embed if params.head is None else params.head
    (logits,) = projection(x, head, norm=Norm(params.norm, params.config.norm_eps), dtype=jnp.float32)
    return shard.gather_over_model(logits)[..., : params.config.vocab_size]  # padded where devices do not divide it
