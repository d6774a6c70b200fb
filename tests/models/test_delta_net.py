"""The gated delta net against its recurrence in NumPy, token by token and in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, ModelConfig, RopeConfig
from kvjax.models import delta_net, init
from kvjax.models.layer import Layer, layers_of

MIXER = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=5)
WIDTH = 16


def layer_of(mixer: DeltaNetConfig = MIXER) -> Layer:
    """One layer with random weights, whose memory decays at several rates."""
    mlp = MLPConfig(8)
    attention = AttentionConfig(2, 1, 8, RopeConfig(1e4, 8))
    config = ModelConfig("qwen3_5_text", 10, WIDTH, (LayerConfig(mixer, mlp), LayerConfig(attention, mlp)), 100)
    layer = layers_of(init(config, jax.random.key(0)))[0]
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> jax.Array:
        return jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    attn: Any = layer.params.attn
    attn = dataclasses.replace(
        attn, **{name: drawn(getattr(attn, name)) for name in ("log_decay", "dt_bias", "out_norm")}
    )
    return layer._replace(params=dataclasses.replace(layer.params, attn=attn))


def recurrence(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: np.ndarray, rate: np.ndarray, memory: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, Y] of one head, and its matrix [X, Y] after all tokens."""
    out = []
    for t in range(len(q)):
        memory = memory * np.exp(log_decay[t])
        memory = memory + np.outer(k[t], rate[t] * (v[t] - k[t] @ memory))
        out.append(q[t] @ memory)
    return np.array(out), memory


def oracle(layer: Layer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of the output projection [T, P] of one row, and its memory [M, X, Y]."""
    mixer: Any = layer.config.mixer
    p: Any = jax.tree.map(lambda a: np.asarray(a, np.float64), layer.params)
    x = x.astype(np.float64)
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + layer.eps) * p.attn_norm

    def sigmoid(a: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-a))

    def convolved(matrix: np.ndarray, kernel: np.ndarray, dim: int) -> np.ndarray:
        padded = np.concatenate([np.zeros((mixer.conv - 1, len(matrix))), x @ matrix.T])
        y = np.array([np.sum(padded[t : t + mixer.conv] * kernel.T, axis=0) for t in range(len(x))])
        return (y * sigmoid(y)).reshape(len(x), -1, dim)

    q, k = (convolved(m, w, mixer.key_dim) for m, w in ((p.attn.q, p.attn.q_conv), (p.attn.k, p.attn.k_conv)))
    q, k = (a / np.sqrt(np.sum(a**2, -1, keepdims=True) + 1e-6) for a in (q, k))
    v = convolved(p.attn.v, p.attn.v_conv, mixer.value_dim)
    log_decay = -np.exp(p.attn.log_decay) * np.log1p(np.exp(x @ p.attn.alpha.T + p.attn.dt_bias))
    rate = sigmoid(x @ p.attn.beta.T)
    group = mixer.value_heads // mixer.key_heads
    zero = np.zeros((mixer.key_dim, mixer.value_dim))
    heads = [
        recurrence(q[:, j // group] * mixer.key_dim**-0.5, k[:, j // group], v[:, j], log_decay[:, j], rate[:, j], zero)
        for j in range(mixer.value_heads)
    ]
    out = np.stack([each for each, _ in heads], axis=1)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + layer.eps) * p.attn.out_norm
    z = x @ p.attn.z.T
    return out.reshape(len(x), -1) * z * sigmoid(z), np.stack([memory for _, memory in heads])


def inputs(rows: int, size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, size, WIDTH)), jnp.float32)


_LAYER = layer_of()


@jax.jit
def _read(x: jax.Array, state: Any, count: jax.Array) -> Any:
    return delta_net.read_block(_LAYER, x, state, count)


@jax.jit
def _step(x: jax.Array, state: Any) -> Any:
    return delta_net.step(_LAYER, x, state)


def _start(rows: int) -> Any:
    return delta_net.start(_LAYER, jnp.zeros((rows, WIDTH)))


def test_the_recurrence_of_two_tokens_by_hand() -> None:
    """k = (0.6, 0.8), v = (1, 2), q = (1, 0) / √2, β = 0.5, e^g = 0.9, twice."""
    k, v, q = np.array([0.6, 0.8]), np.array([1.0, 2.0]), np.array([1.0, 0.0]) / np.sqrt(2)
    two = [np.stack([a, a]) for a in (q, k, v)]
    out, memory = recurrence(*two, np.log([0.9, 0.9]), np.array([0.5, 0.5]), np.zeros((2, 2)))
    np.testing.assert_allclose(out, [[0.212132, 0.424264], [0.307591, 0.615183]], atol=1e-6)
    np.testing.assert_allclose(memory, [[0.435, 0.87], [0.58, 1.16]])


@pytest.mark.parametrize("size", [1, 3, 64, 65, 150])
def test_a_prompt_equals_the_recurrence(size: int) -> None:
    """Shorter than the convolution, a whole chunk, one token more, and chunks of which the last is not full."""
    x = inputs(1, size)
    out, state = _read(x, _start(len(x)), jnp.asarray([size], jnp.int32))
    want, memory = oracle(_LAYER, np.asarray(x[0]))
    np.testing.assert_allclose(out[0], want, atol=2e-5)
    np.testing.assert_allclose(state.memory[0], memory, atol=2e-5)


def test_rows_of_several_lengths_do_not_depend_on_their_padding() -> None:
    x, lengths = inputs(4, 150), [150, 70, 2, 0]
    out, state = _read(x, _start(len(x)), jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        if not length:
            np.testing.assert_array_equal(state.memory[row], 0)
            continue
        want, memory = oracle(_LAYER, np.asarray(x[row, :length]))
        np.testing.assert_allclose(out[row, :length], want, atol=2e-5)
        np.testing.assert_allclose(state.memory[row], memory, atol=2e-5)
    other = _read(x.at[1, 70:].set(7.0), _start(4), jnp.asarray(lengths, jnp.int32))[1]
    jax.tree.map(np.testing.assert_array_equal, other, state)


def test_blocks_and_steps_go_on_where_a_prompt_ends() -> None:
    """130 tokens in blocks of 70, 0 and 40 tokens of 70, and then by steps."""
    x = inputs(2, 130)
    state = _start(2)
    parts: list[Any] = []
    for begin, count in ((0, 70), (70, 0), (70, 40)):
        block = jnp.pad(x[:, begin : begin + count], ((0, 0), (0, 70 - count), (0, 0)), constant_values=9.0)
        out, after = _read(block, state, jnp.asarray([count, count], jnp.int32))
        if not count:
            jax.tree.map(np.testing.assert_array_equal, after, state)
        parts.append(out[:, :count])
        state = after
    for t in range(110, 130):
        out, state = _step(x[:, t], state)
        parts.append(out[:, None])
    got = jnp.concatenate(parts, axis=1)
    for row in range(2):
        want, memory = oracle(_LAYER, np.asarray(x[row]))
        np.testing.assert_allclose(got[row], want, atol=3e-5)
        np.testing.assert_allclose(state.memory[row], memory, atol=2e-5)


def test_gradients_of_chunks_are_those_of_steps() -> None:
    x = inputs(1, 70)

    def by_block(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(delta_net.read_block(_LAYER, x, delta_net.start(_LAYER, x))[0]))

    def by_step(x: jax.Array) -> jax.Array:
        def one(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            out, state = delta_net.step(_LAYER, token, state)
            return state, out

        _, out = jax.lax.scan(one, delta_net.start(_LAYER, x), jnp.swapaxes(x, 0, 1))
        return jnp.sum(jnp.sin(out))

    np.testing.assert_allclose(jax.jit(jax.grad(by_block))(x), jax.jit(jax.grad(by_step))(x), rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
        ({"conv": 1}, "conv=1 must be at least two tokens"),
        ({"key_dim": 0}, "key_dim=0 must be at least 1"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(MIXER, **changes)
