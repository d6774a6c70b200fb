"""Attention sinks against their definition: one more logit for each query head in every softmax, without a value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.lowering import on

from kvjax.pallas_kernels import (
    attention_mass,
    block_attention,
    decode_attention,
    prefill_attention,
    window_scores,
)
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.prefill_attention import api as prefill_api
from kvjax.pallas_kernels.prefill_attention import reference

SCALE = 0.3
SINKS = np.array([-2.0, 0.5, 3.0, 40.0], np.float32)
"""One that takes little, and one that takes nearly all."""


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def shares(logits: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Probabilities [B, N, S, T], of a softmax over the visible tokens and the head's sink, in float64."""
    wide = np.where(visible, logits.astype(np.float64), -np.inf)
    sinks = np.broadcast_to(SINKS[:, None, None], (*wide.shape[:3], 1))
    joined = np.concatenate([wide, sinks], axis=-1)
    weights = np.exp(joined - joined.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True))[..., :-1]


def products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Logits [B, N, S, T] of q [B, S, N, H] and k [B, T, K, H]."""
    wide = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bsnh,btnh->bnst", q, wide) * SCALE


def attended(probs: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Values [B, S, N, H] of probabilities [B, N, S, T] and v [B, T, K, H]."""
    return np.einsum("bnst,btnh->bsnh", probs, np.repeat(v, probs.shape[1] // v.shape[2], axis=2))


def causal(length: int, window: int | None) -> np.ndarray:
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance < (window or length))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("implementation", ["xla", "blocks", "tpu"])
def test_prefill_attention(implementation: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    length, dim = (128, 64) if implementation == "tpu" else (75, 16)
    if implementation == "blocks":
        monkeypatch.setattr(reference, "BLOCK", 32)
    q, k, v = draw(0, (2, length, 4, dim), (2, length, 2, dim), (2, length, 2, dim))
    which = {"implementation": "tpu", "interpret": True} if implementation == "tpu" else {"implementation": "xla"}

    def run(q, k, v, sinks):
        return prefill_attention(q, k, v, scale=SCALE, window=window, sinks=sinks, **which)

    got = jax.jit(run)(q, k, v, SINKS)
    np.testing.assert_allclose(got, attended(shares(products(q, k), causal(length, window)), v), atol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_block_attention(implementation: str) -> None:
    """Row 1 has two free slots, and a query of padding."""
    size, slots, dim = 3, 40, 64
    q, k, v = draw(1, (2, size, 4, dim), (2, slots, 2, dim), (2, slots, 2, dim))
    pos = np.broadcast_to(np.arange(slots, dtype=np.int32), (2, 2, slots)).copy()
    pos[1, :, 5:7] = -1
    q_pos = np.array([[37, 38, 39], [38, 39, -1]], np.int32)
    visible = (pos[:, 0] >= 0)[:, None] & (pos[:, :1] <= q_pos[:, :, None])
    expected = attended(shares(products(q, k), visible[:, None]), v)
    heads = [jnp.asarray(x.swapaxes(1, 2)) for x in (k, v)]
    options = {"scale": SCALE, "implementation": implementation, "interpret": implementation != "xla"}
    got = block_attention(
        jnp.asarray(q), *heads, jnp.asarray(q_pos), jnp.asarray(pos), sinks=jnp.asarray(SINKS), **options
    )
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "gpu", "tpu"])
def test_decode_attention(implementation: str, probs: bool) -> None:
    """Kernels have no probabilities beside sinks. Row 1 has nothing to attend to."""
    slots, dim = 32, 64
    q, k, v = draw(2, (2, 4, dim), (2, 2, slots, dim), (2, 2, slots, dim))
    weight = np.ones((2, 2, slots), np.float32)
    weight[0, :, 3] = 0
    weight[1] = 0
    options = {"scale": SCALE, "probs": probs, "sinks": jnp.asarray(SINKS), "implementation": implementation}
    given = [jnp.asarray(x) for x in (q, k, v, weight)]
    if probs and implementation != "xla":
        with pytest.raises(Unsupported, match="probabilities beside attention sinks"):
            decode_attention(*given, **options, interpret=True)
        return
    got = decode_attention(*given, **options, interpret=implementation != "xla")
    logits = np.einsum("bnh,bnch->bnc", q, np.repeat(k, 2, axis=1))[:, :, None] * SCALE
    expected = shares(logits, np.repeat(weight, 2, axis=1)[:, :, None] > 0)
    values = np.einsum("bnsc,bnch->bnh", expected, np.repeat(v, 2, axis=1))
    np.testing.assert_allclose(got.out, values, atol=2e-5)
    if probs:
        np.testing.assert_allclose(got.probs, expected.reshape(2, 2, 2, slots).mean(axis=2), atol=2e-5)


@pytest.mark.parametrize("sliding", [None, 9])
def test_scores_are_those_of_the_models_own_probabilities(sliding: int | None) -> None:
    """The observation window of SnapKV, and H2O's sums over all queries."""
    length, lengths = 30, np.array([30, 21], np.int32)
    q, k = draw(3, (2, length, 4, 16), (2, length, 2, 16))
    real = np.arange(length) < lengths[:, None]
    visible = causal(length, sliding)[None, None] & real[:, None, None] & real[:, None, :, None]
    probs = shares(products(q, k), visible).reshape(2, 2, 2, length, length).mean(axis=2)
    last = (np.arange(length) >= lengths[:, None] - 6) & real
    window = (probs * last[:, None, :, None]).sum(axis=2) / 6
    given = [jnp.asarray(x) for x in (q, k, lengths)]
    options = {"scale": SCALE, "sliding_window": sliding, "sinks": jnp.asarray(SINKS)}
    np.testing.assert_allclose(window_scores(*given, window=6, **options), window, atol=1e-6)
    mass = (probs * real[:, None, :, None]).sum(axis=2)
    np.testing.assert_allclose(attention_mass(*given, **options), mass, atol=1e-5)


def test_who_cannot_serve_says_why() -> None:
    q, k = (jnp.zeros((1, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
    sinks = jnp.asarray(SINKS)
    for implementation in ("gpu", "tpu"):
        with pytest.raises(Unsupported, match="there are attention sinks"):
            window_scores(q, k, jnp.asarray([128]), window=8, scale=1.0, sinks=sinks, implementation=implementation)
    with pytest.raises(Unsupported, match="there are attention sinks"):
        prefill_attention(q, k, k, scale=1.0, sinks=sinks, implementation="gpu")


def test_gradients_are_finite_where_nothing_is_attended_to() -> None:
    q, k, v = (jnp.asarray(x) for x in draw(4, (1, 2, 4, 16), (1, 2, 8, 16), (1, 2, 8, 16)))
    pos = jnp.full((1, 2, 8), -1, jnp.int32).at[:, 0, 0].set(0)

    def total(q, k, v, sinks):
        out = block_attention(q, k, v, jnp.asarray([[0, -1]], jnp.int32), pos, scale=SCALE, sinks=sinks)
        return jnp.sum(out**2)

    found = jax.grad(total, argnums=(0, 1, 2, 3))(q, k, v, jnp.asarray(SINKS))
    assert all(np.isfinite(x).all() for x in found)
    assert np.abs(found[3][:2]).min() > 0
    assert not np.any(found[3][2:])


def test_prompts_have_a_kernel_on_hopper_gpus() -> None:
    """Unless there is a window. `tests/device` compares it with float64."""
    q, k, sinks = jnp.zeros((1, 8, 4, 64), jnp.bfloat16), jnp.zeros((1, 8, 2, 64), jnp.bfloat16), jnp.asarray(SINKS)
    for kind, window, expected in (
        ("NVIDIA H100 80GB HBM3", None, "prompt_attention"),
        ("NVIDIA H100 80GB HBM3", 8, "prompt_attention"),
        ("NVIDIA H100 80GB HBM3", 7, None),
        ("NVIDIA A100-SXM4-80GB", None, None),
    ):
        with on(kind):
            kernel = prefill_api._PREFILL.kernel(q, k, k, scale=1.0, window=window, sinks=sinks)
        assert (kernel and kernel.__module__.rpartition(".")[2]) == expected
