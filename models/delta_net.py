"""The gated delta net of one layer, a recurrent mixer (Yang et al. 2024, https://arxiv.org/abs/2412.06464).

Each value head has a matrix S from keys to values. With the key k, the value v, the query q, the decay e^g and the rate β
of a token:

    S ← e^g · S
    S ← S + k (β · (v − Sᵀ k))ᵀ
    out = Sᵀ q

q, k and v are projections of the token, after a causal convolution of each channel over the latest tokens. `step` is this
recurrence for one token. `read_block` computes the same for many tokens, a chunk at a time: within a chunk, what tokens
write is the solution of a triangular system (Section 3.3 of the paper), and only chunks follow one another.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import RecurrentState
from kvjax.config import DeltaNetConfig
from kvjax.pallas_kernels import Norm, projection

from .layer import Layer
from .params import DeltaNet

CHUNK = 64
"""Tokens of a chunk. Larger chunks have larger triangular systems, smaller ones more steps."""

_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


class _Inputs(NamedTuple):
    """Inputs of the recurrence in float32. X key channels, Y value channels, M value heads."""

    q: Float[Array, "*B M X"]
    k: Float[Array, "*B M X"]
    v: Float[Array, "*B M Y"]
    log_decay: Float[Array, "*B M"]
    rate: Float[Array, "*B M"]


class _Projected(NamedTuple):
    """Projections of a layer's input: inputs of the convolution, the output's gate, and those of decay and rate."""

    q: Float[Array, "*B Q"]
    k: Float[Array, "*B Q"]
    v: Float[Array, "*B P"]
    z: Float[Array, "*B P"]
    alpha: Float[Array, "*B M"]
    beta: Float[Array, "*B M"]


def start(layer: Layer, x: Float[Array, "B *T D"]) -> RecurrentState:
    """The state of each row before its first token, in the sizes of this device's parameters."""
    config, p, rows = _config(layer), _params(layer), x.shape[0]

    def inputs(kernel: Float[Array, "C W"]) -> Float[Array, "B C U"]:
        return jnp.zeros((rows, kernel.shape[0], config.conv - 1), x.dtype)

    memory = jnp.zeros((rows, p.alpha.shape[0], config.key_dim, config.value_dim), jnp.float32)
    return RecurrentState(inputs(p.q_conv), inputs(p.k_conv), inputs(p.v_conv), memory)


def step(layer: Layer, x: Float[Array, "B D"], state: RecurrentState) -> tuple[Float[Array, "B P"], RecurrentState]:
    """Process one token per row. Returns the inputs of the output projection, and the state."""
    projected = _project(layer, x)
    one = jnp.ones((x.shape[0],), jnp.int32)
    channels = _channels(layer, projected, state)
    (q, q_state), (k, k_state), (v, v_state) = (_convolved(x[:, None], b, w, one) for x, b, w in channels)
    inputs = _inputs(layer, q[:, 0], k[:, 0], v[:, 0], projected)
    memory = state.memory * jnp.exp(inputs.log_decay)[..., None, None]
    written = inputs.v - jnp.einsum("bmxy,bmx->bmy", memory, inputs.k, precision=jax.lax.Precision.HIGHEST)
    written = written * inputs.rate[..., None]
    memory = memory + inputs.k[..., None] * written[..., None, :]
    out = jnp.einsum("bmxy,bmx->bmy", memory, inputs.q, precision=jax.lax.Precision.HIGHEST)
    return _gated(layer, out, projected.z), RecurrentState(q_state, k_state, v_state, memory)


def read_block(
    layer: Layer, x: Float[Array, "B S D"], state: RecurrentState, count: Int[Array, " B"] | None = None
) -> tuple[Float[Array, "B S P"], RecurrentState]:
    """Process a right-padded block of tokens.

    Args:
        layer: the layer.
        x: its input.
        state: the state before the block.
        count: number of tokens in each row; None if all are tokens. A row with 0 keeps its state.

    Returns:
        The inputs of the output projection, which are meaningless beyond a row's tokens, and the state after the block.
    """
    rows, size = x.shape[:2]
    count = jnp.full((rows,), size, jnp.int32) if count is None else count
    projected = _project(layer, x)
    channels = _channels(layer, projected, state)
    (q, q_state), (k, k_state), (v, v_state) = (_convolved(*each, count) for each in channels)
    inputs = _inputs(layer, q, k, v, projected)
    token = jnp.arange(size, dtype=jnp.int32) < count[:, None]
    # Where there is no token, nothing decays and nothing is written.
    inputs = inputs._replace(
        log_decay=jnp.where(token[..., None], inputs.log_decay, 0.0), rate=jnp.where(token[..., None], inputs.rate, 0.0)
    )
    out, memory = _chunked(inputs, state.memory, _precision(x.dtype))
    return _gated(layer, out, projected.z), RecurrentState(q_state, k_state, v_state, memory)


def _chunked(
    inputs: _Inputs, memory: Float[Array, "B M X Y"], precision: jax.lax.Precision, chunk: int = CHUNK
) -> tuple[Float[Array, "B S M Y"], Float[Array, "B M X Y"]]:
    """The recurrence over the S tokens of a block.

    With the sums G of log decays within a chunk, and the matrix S before it, tokens write D = (d₁, d₂, …), where

        d_t = β_t (v_t − e^{G_t} Sᵀ k_t − Σ_{i<t} e^{G_t − G_i} (k_i · k_t) d_i)

    This is a unit lower triangular system. Its solution is linear in S, so all but that is computed for all chunks at once.
    So are the outputs, from what the tokens read of S and what they wrote.
    """
    dot = partial(jnp.einsum, precision=precision)
    size = inputs.q.shape[1]
    chunk = min(chunk, size)
    pad = -size % chunk

    def cut(x: Float[Array, "B S M *_"]) -> Float[Array, "n B M C *_"]:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, log_decay, rate = map(cut, inputs)
    total = jnp.cumsum(log_decay, axis=-1)
    place = jnp.arange(chunk, dtype=jnp.int32)
    earlier = jnp.broadcast_to(place[:, None] >= place, (*total.shape, chunk))
    between = jnp.exp(jnp.where(earlier, total[..., None] - total[..., None, :], -jnp.inf))  # of i's share in t
    before = jnp.broadcast_to(place[:, None] > place, between.shape)
    system = jnp.where(before, dot("nbmtx,nbmix->nbmti", k, k) * between * rate[..., None], 0.0)
    scale = jnp.exp(total)[..., None]
    sides = jnp.concatenate([v * rate[..., None], k * scale * rate[..., None]], axis=-1)
    solved = dot("nbmti,nbmix->nbmtx", _inverse(system, dot), sides)
    free, of_memory = jnp.split(solved, [v.shape[-1]], axis=-1)
    end = total[..., -1:]
    parts = jnp.concatenate([of_memory, q * scale], axis=-2), free, k * jnp.exp(end - total)[..., None], end

    def one(memory: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        readers, free, k, end = part
        taken, read = jnp.split(dot("bmtx,bmxy->bmty", readers, memory), 2, axis=-2)
        written = free - taken
        return memory * jnp.exp(end)[..., None] + dot("bmtx,bmty->bmxy", k, written), (read, written)

    memory, (read, written) = jax.lax.scan(one, memory, parts)
    attention = dot("nbmtx,nbmix->nbmti", q, k) * between
    out = read + dot("nbmti,nbmiy->nbmty", attention, written)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :size], memory


def _inverse(lower: Float[Array, "*B C C"], dot: Callable[..., Array]) -> Float[Array, "*B C C"]:
    """Inverse of I + L, where L is strictly lower triangular, by matmuls alone.

    It starts with the diagonal blocks of one token. If X has the inverses of diagonal blocks, and J the entries of L that
    join the blocks of each pair, then X − X J X has the inverses of blocks twice as large.
    """
    size = lower.shape[-1]
    place = jnp.arange(size, dtype=jnp.int32)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        pair, half = place // (2 * block), place // block
        joins = jnp.broadcast_to((pair[:, None] == pair) & (half[:, None] > half), lower.shape)
        join = jnp.where(joins, lower, 0.0)
        inverse = inverse - (join if block == 1 else dot("...ij,...jk,...kl->...il", inverse, join, inverse))
        block *= 2
    return inverse


def _project(layer: Layer, x: Float[Array, "*B D"]) -> _Projected:
    p = _params(layer)
    norm = layer.maybe_norm(layer.params.attn_norm)
    return _Projected(*projection(x, p.q, p.k, p.v, p.z, p.alpha, p.beta, norm=norm))


def _channels(layer: Layer, projected: _Projected, state: RecurrentState) -> list[tuple[Array, Array, Array]]:
    """Inputs of the convolution, those at the latest tokens before, and its kernels: for queries, keys and values."""
    p = _params(layer)
    kernels, inputs = (p.q_conv, p.k_conv, p.v_conv), (projected.q, projected.k, projected.v)
    return list(zip(inputs, (state.q, state.k, state.v), kernels, strict=True))


def _convolved(
    x: Float[Array, "B S C"], before: Float[Array, "B C U"], kernel: Float[Array, "C W"], count: Int[Array, " B"]
) -> tuple[Float[Array, "B S C"], Float[Array, "B C U"]]:
    """silu of the causal convolution of each channel, and the inputs at the latest tokens after `count` tokens."""
    size, width = x.shape[1], kernel.shape[1]
    every = jnp.concatenate([jnp.swapaxes(before, 1, 2), x], axis=1)
    wide, kernel = every.astype(jnp.float32), kernel.astype(jnp.float32)
    y = sum(wide[:, j : j + size] * jnp.broadcast_to(kernel[:, j], x.shape) for j in range(width))
    at = count[:, None] + jnp.arange(width - 1, dtype=jnp.int32)
    latest = jnp.take_along_axis(every, at[..., None], axis=1)
    return jax.nn.silu(y).astype(x.dtype), jnp.swapaxes(latest, 1, 2)


def _inputs(layer: Layer, q: Array, k: Array, v: Array, projected: _Projected) -> _Inputs:
    """Inputs of the recurrence. Each query and key head serves several value heads."""
    config, p = _config(layer), _params(layer)
    group = config.value_heads // config.key_heads

    def unit(x: Float[Array, "*B Q"]) -> Float[Array, "*B M X"]:
        x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, config.key_dim)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
        return jnp.repeat(x, group, axis=-2)

    alpha = projected.alpha.astype(jnp.float32)
    bias, log_decay = (jnp.broadcast_to(x.astype(jnp.float32), alpha.shape) for x in (p.dt_bias, p.log_decay))
    return _Inputs(
        q=unit(q) * config.key_dim**-0.5,
        k=unit(k),
        v=v.astype(jnp.float32).reshape(*v.shape[:-1], -1, config.value_dim),
        log_decay=-jnp.exp(log_decay) * jax.nn.softplus(alpha + bias),
        rate=jax.nn.sigmoid(projected.beta.astype(jnp.float32)),
    )


def _gated(layer: Layer, out: Float[Array, "*B M Y"], z: Float[Array, "*B P"]) -> Float[Array, "*B P"]:
    """Outputs of all heads, normalised and multiplied by silu of their gate."""
    out = Norm(_params(layer).out_norm, layer.eps)(out.astype(z.dtype))
    gate = jax.nn.silu(z.astype(jnp.float32))
    return (out.astype(jnp.float32).reshape(z.shape) * gate).astype(z.dtype)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Precision of products within chunks: that of float32 for a model in float32.

    For others, more than their own precision is enough: TF32 on GPUs, and three passes in bfloat16 on TPUs.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.HIGH


def _config(layer: Layer) -> DeltaNetConfig:
    assert isinstance(layer.config.mixer, DeltaNetConfig)
    return layer.config.mixer


def _params(layer: Layer) -> DeltaNet:
    assert isinstance(layer.params.attn, DeltaNet)
    return layer.params.attn
