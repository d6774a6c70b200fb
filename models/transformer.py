"""The transformer's forward pass, as functions of a parameter pytree.

The same block serves four uses, which differ in what attention sees:

- `forward`: all positions, without a cache
- `prefill`: a prompt; returns caches
- `read_block`: a block of a text; updates caches
- `decode_step`: one token; updates caches

A recurrent layer (`delta_net`) has a state of its own instead of a cache, which the model computes.

Caches are used only through the policy's layers, so nothing here depends on a method.

Layers are unrolled, as each has its own cache shape and a scan would copy weights and caches. At the shape of
Llama-3.1-8B on an H200, a token takes 4.94 ms unrolled and 17.95 ms scanned.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax._util.any_rank import any_rank
from kvjax.cache import PromptKV, RecurrentState, Shard, Token, TokenBlock, where_rows
from kvjax.cache.shard import ONE_DEVICE
from kvjax.pallas_kernels import (
    BlockWeights,
    Norm,
    QuantizedMatrix,
    fused_decode_block,
    lookup,
    projection,
)
from kvjax.policies.attention_context import AttentionContext
from kvjax.policies.checks import calling, expect_same_state, expect_shape
from kvjax.policies.layer import CacheLayer, Carry

from . import delta_net
from .attention import Heads, causal_attention, heads_of, prompt_attention, queries_ahead, split_heads
from .experts import add_experts
from .layer import Layer, layers_of
from .mlp import add_mlp
from .params import Attention, Experts, Params
from .residual import add_projection

HEAD_BLOCK = 256
"""Positions that pass through the vocabulary head at a time when a text is scored."""

Attend = Callable[[Array, Array, Array], Array]
"""Attention of one layer: maps unrotated q [..., N, H] and k, v [..., K, H] to values [..., N, H]."""

Fused = Callable[[Array, Array], tuple[Array, Heads]]
"""From the residual stream and a layer's attention to the residual stream after it and the next layer's heads."""

AttendAt = Callable[[int, Array, Array, Array], Array]
"""Attention of any layer; the first argument is the layer's index."""


@any_rank
def forward(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of all positions in float32. Each position attends to itself and all earlier ones; rows may be right-padded."""
    return _logits(params, hidden(params, tokens))


@any_rank
def token_logprobs(
    params: Params, tokens: Int[Array, "B T"], shard: Shard = ONE_DEVICE, temperature: float | Array = 1.0
) -> Float[Array, "B T-1"]:
    """Log-probability of each token given those before it, from the second token on, under softmax(logits / temperature).

    Only `HEAD_BLOCK` positions pass through the vocabulary head at a time, so no [B, T, V] array is needed.
    """
    x = hidden(params, tokens, shard=shard)[:, :-1]
    batch, length, width = x.shape
    pad = -length % HEAD_BLOCK
    blocks = jnp.pad(x, [(0, 0), (0, pad), (0, 0)]).reshape(batch, -1, HEAD_BLOCK, width)
    targets = jnp.pad(tokens[:, 1:], [(0, 0), (0, pad)]).reshape(batch, -1, HEAD_BLOCK)

    def score(block: tuple[Array, Array]) -> Array:
        logits = _logits(params, block[0], shard) / temperature
        chosen = jnp.take_along_axis(logits, block[1][..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    scores = jax.lax.map(score, (jnp.moveaxis(blocks, 1, 0), jnp.moveaxis(targets, 1, 0)))
    return jnp.moveaxis(scores, 0, 1).reshape(batch, -1)[:, :length]


@any_rank
def hidden(
    params: Params, tokens: Int[Array, "B T"], attend: AttendAt | None = None, shard: Shard = ONE_DEVICE
) -> Float[Array, "B T D"]:
    """Residual stream after the last layer, with causal attention.

    Args:
        params: the model.
        tokens: token ids.
        attend: replaces attention in the layers that have it, for studies of what a model needs of it.
        shard: how devices share the model.
    """
    config = params.config
    ropes = dict(zip(config.kinds, config.resolve_ropes(tokens.shape[1]), strict=True))

    def causal(layer: int, q: Array, k: Array, v: Array) -> Array:
        kind = config.layers[layer]
        return causal_attention(kind.attention, ropes[kind], q, k, v, params.layers[layer].sinks)

    x, pos = _embed(params, tokens, shard), _positions(tokens)
    for i, layer in enumerate(layers_of(params)):
        if layer.is_recurrent:
            x, _ = _read_recurrent(layer, x, delta_net.start(layer, x), None, shard)
            continue
        x = _block(layer, x, pos, partial(attend or causal, i), shard)
    return x


@any_rank
def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    total: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Prefill right-padded prompts.

    Args:
        params: the model.
        tokens: token ids.
        lengths: number of tokens in each row.
        total: final length of each row, including new tokens.
        caches: the policy's layers.

    Returns:
        Logits of each row's last token (only that position passes through the vocabulary head), and one state per
            layer.
    """
    shard = caches[0].spec.shard
    x: Array = _embed(params, tokens, shard)
    pos = _positions(tokens)
    states: list[Any] = []
    carry: Carry = {}
    for layer, cache in zip(layers_of(params), caches, strict=True):
        if layer.is_recurrent:
            x, memory = _read_recurrent(layer, x, delta_net.start(layer, x), lengths, shard)
            states.append(cache.advance(memory))
            continue
        around: Callable[[Carry], Carry] = partial(_surrounded, layer, x, cache)

        def attend(
            q: Array,
            k: Array,
            v: Array,
            cache: CacheLayer[Any] = cache,
            around: Callable[[Carry], Carry] = around,
            sinks: Array | None = layer.params.sinks,
        ) -> Array:
            nonlocal carry
            spec = cache.spec
            prompt = PromptKV.of(spec.rope, q, k, v, lengths, total, sinks)
            with calling(cache, "prefill"):
                state, carry = cache.prefill(prompt, around(carry))
            out = prompt_attention(spec, prompt)
            # Compress now: XLA otherwise delays it to the end, and keeps the keys and values of all layers until then.
            out, state = jax.lax.optimization_barrier((out, state))
            states.append(state)
            return out

        x = _block(layer, x, pos, attend, shard)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return _logits(params, last, shard), tuple(states)


@any_rank
def decode_step(
    params: Params,
    states: Sequence[Any],
    token: Int[Array, " B"],
    pos: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
    live: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Process one token per row at original position `pos`.

    Args:
        params: the model.
        states: one state per layer.
        token: token ids.
        pos: original position of each token.
        caches: the policy's layers.
        live: rows that have a token. The states of other rows do not change, and their logits are meaningless. None if
            all rows have one.

    Returns:
        The next token's logits, and the states with the token appended.
    """
    layers, shard = layers_of(params), caches[0].spec.shard
    x = before = _embed(params, token, shard)
    heads: Heads | None = None
    updated: list[Any] = []
    carry: Carry = {}
    for i, (layer, cache, state) in enumerate(zip(layers, caches, states, strict=True)):
        if layer.is_recurrent:
            out, after = delta_net.step(layer, x, state)
            updated.append(cache.advance(after if live is None else where_rows(live, after, state)))
            before, x, heads = x, _rest(layer, x, out, shard), None
            continue
        heads = heads or heads_of(layer, x, pos)
        gate, sinks = heads.gate, layer.params.sinks
        new = Token(heads.q, heads.k, heads.v, pos, cache.spec.rope, live, sinks=sinks)
        if cache.needs_token_inputs:
            new = dataclasses.replace(new, inputs=layer.normed(x, layer.params.attn_norm))
        if i > 0:
            with calling(cache, "look_ahead"):
                carry = cache.look_ahead(partial(queries_ahead, layers[i - 1], layer, before, pos), pos, carry)
        with calling(cache, "append"):
            held = cache.append(state, new)
        expect_same_state(cache, "append", state, held)
        with calling(cache, "attend"):
            out, after, carry = cache.attend(held, new, carry)
        expect_shape(cache.policy, "attend", out, "B N H", new.q.shape)
        expect_same_state(cache, "attend", held, after)
        updated.append(after if live is None else where_rows(live, after, held))
        before, out = x, out.reshape(*x.shape[:-1], -1)
        fused = _fused(layer, layers[i + 1], pos, shard) if i + 1 < len(layers) else None
        x, heads = (_rest(layer, x, out, shard, gate=gate), None) if fused is None else fused(x, out)
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
    """Prefill a right-padded block of a text. What its tokens attend to is defined by `CacheLayer.read_block`.

    Args:
        params: the model.
        states: one state per layer.
        tokens: token ids.
        pos: original position of each row's first token.
        count: number of tokens in each row. For a row with 0, the caches do not change and the logits are meaningless.
        total: final length of each row, including new tokens.
        caches: the policy's layers.

    Returns:
        Logits of each row's last token, and the states.
    """
    shard = caches[0].spec.shard
    x: Array = _embed(params, tokens, shard)
    updated: list[Any] = []
    carry: Carry = {}
    for layer, cache, state in zip(layers_of(params), caches, states, strict=True):
        if layer.is_recurrent:
            x, memory = _read_recurrent(layer, x, state, count, shard)
            updated.append(cache.advance(memory))
            continue
        around: Callable[[Carry], Carry] = partial(_surrounded, layer, x, cache)

        def attend(
            q: Array,
            k: Array,
            v: Array,
            cache: CacheLayer[Any] = cache,
            state: Any = state,
            around: Callable[[Carry], Carry] = around,
            sinks: Array | None = layer.params.sinks,
        ) -> Array:
            nonlocal carry
            block = TokenBlock(q, k, v, pos, count, total, cache.spec.rope, sinks)
            with calling(cache, "read_block"):
                out, state, carry = cache.read_block(state, block, around(carry))
            expect_shape(cache.policy, "read_block", out, "B S N H", q.shape)
            out, state = jax.lax.optimization_barrier((out, state))  # see `prefill`
            updated.append(state)
            return out

        x = _block(layer, x, _positions(tokens, pos), attend, shard)
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return _logits(params, last, shard), tuple(updated)


@any_rank
def attention_gradients(
    params: Params,
    states: Sequence[Any],
    tokens: Int[Array, "B S"],
    pos: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    caches: Sequence[CacheLayer[Any]],
) -> Float[Array, "L B S"]:
    """Norms of gradients with respect to what each layer's attention adds to the residual stream, at each token.

    The objective is the sum of the squares of the residual stream after the last layer, over the tokens of the block.
    Each layer is computed again in the backward pass, so that attention probabilities of one layer are in memory. The
    norms have no derivatives themselves.

    Args:
        params, states, tokens, pos, count, total, caches: as for `read_block`. States do not change.
    """
    shard = caches[0].spec.shard
    params, states = jax.lax.stop_gradient((params, tuple(states)))  # the norm of zeros has a derivative of NaN
    inside = jnp.arange(tokens.shape[1], dtype=jnp.int32) < count[:, None]

    def objective(added: Float[Array, "L B S D"]) -> Float[Array, ""]:
        x = embedded
        for i, (layer, cache, state) in enumerate(zip(layers_of(params), caches, states, strict=True)):

            def attend(
                q: Array,
                k: Array,
                v: Array,
                cache: CacheLayer[Any] = cache,
                state: Any = state,
                sinks: Array | None = layer.params.sinks,
            ) -> Array:
                block = TokenBlock(q, k, v, pos, count, total, cache.spec.rope, sinks)
                return cache.read_block(state, block, {})[0]

            def block(
                x: Array, more: Array, layer: Layer = layer, attend: Attend = attend, state: Any = state
            ) -> Array:
                if layer.is_recurrent:
                    return _read_recurrent(layer, x, state, count, shard, more)[0]
                heads = heads_of(layer, x, _positions(tokens, pos))
                out = attend(heads.q, heads.k, heads.v)
                return _rest(layer, x, out.reshape(*x.shape[:-1], -1), shard, more, heads.gate)

            x = jax.checkpoint(block)(x, added[i])
        return jnp.sum(jnp.where(inside[..., None], jnp.square(x.astype(jnp.float32)), 0.0))

    embedded = _embed(params, tokens, shard)
    found = jax.grad(objective)(jnp.zeros((len(caches), *embedded.shape), embedded.dtype))
    # Devices have equal objectives, of which JAX differentiates the sum.
    found = shard.sum_over_model(found.astype(jnp.float32)) / shard.model
    return jnp.linalg.norm(found, axis=-1)


def _embed(params: Params, tokens: Array, shard: Shard = ONE_DEVICE) -> Array:
    if shard.model == 1:
        return _scaled(params, lookup(params.embed, tokens, params.dtype))
    own = params.embed.shape[0]  # the vocabulary is sharded in order
    row = tokens - shard.model_index() * own
    mine = (row >= 0) & (row < own)
    vectors = lookup(params.embed, jnp.where(mine, row, 0), params.dtype)
    return _scaled(params, shard.sum_over_model(jnp.where(mine[..., None], vectors, jnp.zeros((), vectors.dtype))))


def _scaled(params: Params, x: Array) -> Array:
    """Embeddings times the model's factor, which is rounded to their type first."""
    scale = params.config.embed_scale
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def _positions(tokens: Int[Array, "B T"], first: Int[Array, " B"] | None = None) -> Int[Array, "B T"]:
    """Positions of a batch's tokens, from `first` in each row, which is 0 by default."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return index if first is None else first[:, None] + index


def _block(
    layer: Layer, x: Float[Array, "... D"], pos: Int[Array, "..."], attend: Attend, shard: Shard = ONE_DEVICE
) -> Float[Array, "... D"]:
    """One transformer block: attention and MLP, each with norms before or after it, and a residual."""
    heads = heads_of(layer, x, pos)
    out = attend(heads.q, heads.k, heads.v)
    return _rest(layer, x, out.reshape(*x.shape[:-1], -1), shard, gate=heads.gate)


def _read_recurrent(
    layer: Layer,
    x: Float[Array, "B S D"],
    state: RecurrentState,
    count: Int[Array, " B"] | None,
    shard: Shard,
    more: Float[Array, "B S D"] | None = None,
) -> tuple[Array, RecurrentState]:
    """One block with a recurrent mixer, to whose output `more` is added. Returns the residual stream and the new state."""
    out, state = delta_net.read_block(layer, x, state, count)
    out, state = jax.lax.optimization_barrier((out, state))  # see `prefill`
    return _rest(layer, x, out, shard, more), state


def _surrounded(layer: Layer, x: Float[Array, "... D"], cache: CacheLayer[Any], carry: Carry) -> Carry:
    """The carry for a layer with input `x`. An `AttentionContext` is added if the layer needs one."""
    if not cache.needs_context:
        return carry
    matrix, shard = layer.params.attn.o, cache.spec.shard

    def output() -> Float[Array, "N H D"]:
        wide = shard.gather_over_same_heads(
            matrix.dequantized(jnp.float32) if isinstance(matrix, QuantizedMatrix) else matrix
        )
        return wide.T.reshape(-1, cache.spec.head_dim, wide.shape[0])

    return AttentionContext(lambda: layer.normed(x, layer.params.attn_norm), output).with_context(carry)


def _fused(layer: Layer, following: Layer, pos: Int[Array, " B"], shard: Shard) -> Fused | None:
    """One operation for the rest of `layer` and the heads of the `following` layer.

    None where the model has biases, norms or factors between the matrices, where devices all-reduce between them, or
    where either layer is recurrent.
    """
    own, p, mlp, after = layer.params, layer.params.attn, layer.params.mlp, following.params.attn
    if not isinstance(p, Attention) or not isinstance(after, Attention) or layer.config.attention.gated:
        return None
    if isinstance(mlp, Experts) or own.mlp_norm is None or following.params.attn_norm is None:
        return None
    between = p.o_bias, own.attn_post_norm, mlp.gate_bias, mlp.up_bias, mlp.down_bias, own.mlp_post_norm
    first, second = layer.norm(own.mlp_norm), following.norm(following.params.attn_norm)
    if (
        layer.residual_scale != 1.0
        or shard.model > 1
        or layer.config.mlp.activation != "silu"
        or any(a is not None for a in between)
    ):
        return None
    weights = BlockWeights(p.o, first, mlp.gate, mlp.up, mlp.down, second, after.q, after.k, after.v)

    def fused(x: Array, out: Array) -> tuple[Array, Heads]:
        moved = fused_decode_block(out, x, weights)
        return moved.x, split_heads(following, [moved.q, moved.k, moved.v], pos)

    return fused


def _rest(
    layer: Layer,
    x: Float[Array, "... D"],
    out: Float[Array, "... A"],
    shard: Shard = ONE_DEVICE,
    more: Float[Array, "... D"] | None = None,
    gate: Float[Array, "... _"] | None = None,
) -> Array:
    """Residual stream after a layer whose mixer's output is `out`, to which `more` is added before the MLP.

    `gate` has the logits of factors on `out`.
    """
    p, attn = layer.params, layer.params.attn
    if out.shape[-1] == layer.config.mixer.output_width // shard.heads:  # all columns, not only this device's
        out = shard.own_columns(out)
    if gate is not None:
        out = out * jax.nn.sigmoid(shard.own_columns(gate))
    bias = attn.o_bias if isinstance(attn, Attention) else None
    x = add_projection(layer, x, out, attn.o, bias, p.attn_post_norm, shard)
    x = x if more is None else x + more
    if isinstance(p.mlp, Experts):
        return add_experts(layer, p.mlp, x, shard)
    return add_mlp(layer, p.mlp, x, shard)


def _logits(params: Params, x: Array, shard: Shard = ONE_DEVICE) -> Array:
    c, head = params.config, params.embed if params.head is None else params.head
    (logits,) = projection(x, head, norm=Norm(params.norm, c.norm_eps, c.norm_offset), dtype=jnp.float32)
    logits = shard.gather_over_model(logits)[..., : c.vocab_size]  # drops the padding of a sharded vocabulary
    logits = logits if c.logit_divisor == 1.0 else logits / c.logit_divisor
    return logits if c.logit_cap is None else c.logit_cap * jnp.tanh(logits / c.logit_cap)
