"""The gated delta net of one layer, a recurrent mixer (Yang et al. 2024, https://arxiv.org/abs/2412.06464).

Each value head has a matrix S from keys to values. With the key k, the value v, the query q, the decay e^g and the rate β
of a token:

    S ← e^g · S
    S ← S + k (β · (v − Sᵀ k))ᵀ
    out = Sᵀ q

q, k and v are projections of the token, after a causal convolution of each channel over the latest tokens. `step` is this
recurrence for one token. `read_block` computes the same for many tokens, by `kvjax.pallas_kernels.delta_rule`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import RecurrentState
from kvjax.config import DeltaNetConfig
from kvjax.pallas_kernels import Norm, delta_rule, projection

from .layer import Layer
from .params import DeltaNet

_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


class _Inputs(NamedTuple):
    """Inputs of the recurrence, all but the values in float32. X key channels, Y value channels, G key heads, M value heads."""

    q: Float[Array, "*B G X"]
    k: Float[Array, "*B G X"]
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
    q, k = (jnp.repeat(x, inputs.v.shape[1] // x.shape[1], axis=1) for x in (inputs.q, inputs.k))
    memory = state.memory * jnp.exp(inputs.log_decay)[..., None, None]
    written = inputs.v - jnp.einsum("bmxy,bmx->bmy", memory, k, precision=jax.lax.Precision.HIGHEST)
    written = written * inputs.rate[..., None]
    memory = memory + k[..., None] * written[..., None, :]
    out = jnp.einsum("bmxy,bmx->bmy", memory, q, precision=jax.lax.Precision.HIGHEST)
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
    out, memory = delta_rule(*inputs, state.memory)
    return _gated(layer, out, projected.z), RecurrentState(q_state, k_state, v_state, memory)


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

    def unit(x: Float[Array, "*B Q"]) -> Float[Array, "*B G X"]:
        x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, config.key_dim)
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)

    alpha = projected.alpha.astype(jnp.float32)
    bias, log_decay = (jnp.broadcast_to(x.astype(jnp.float32), alpha.shape) for x in (p.dt_bias, p.log_decay))
    return _Inputs(
        q=unit(q) * config.key_dim**-0.5,
        k=unit(k),
        v=v.reshape(*v.shape[:-1], -1, config.value_dim),
        log_decay=-jnp.exp(log_decay) * jax.nn.softplus(alpha + bias),
        rate=jax.nn.sigmoid(projected.beta.astype(jnp.float32)),
    )


def _gated(layer: Layer, out: Float[Array, "*B M Y"], z: Float[Array, "*B P"]) -> Float[Array, "*B P"]:
    """Outputs of all heads, normalised and multiplied by silu of their gate."""
    out = Norm(_params(layer).out_norm, layer.eps)(out.astype(z.dtype))
    gate = jax.nn.silu(z.astype(jnp.float32))
    return (out.astype(jnp.float32).reshape(z.shape) * gate).astype(z.dtype)


def _config(layer: Layer) -> DeltaNetConfig:
    assert isinstance(layer.config.mixer, DeltaNetConfig)
    return layer.config.mixer


def _params(layer: Layer) -> DeltaNet:
    assert isinstance(layer.params.attn, DeltaNet)
    return layer.params.attn
