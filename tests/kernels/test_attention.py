"""Attention operations against float64 NumPy, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import prefill_attention, window_scores
from kvjax.pallas_kernels.prefill_attention import reference

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def draw(seed, dtype, *shapes):
    """Random arrays of this type, and the same numbers in float64."""
    random = np.random.default_rng(seed)
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    return arrays, [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


def causal(q, k, v, scale, window):
    """Every query over the keys it can see, in float64."""
    _, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    distance = np.arange(length)[:, None] - np.arange(length)
    visible = (distance >= 0) & (distance < (length if window is None else window))
    out = np.zeros(q.shape)
    for n in range(heads):
        head = n // (heads // kv_heads)
        logits = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, head]) * scale
        out[:, :, n] = softmax(np.where(visible, logits, -np.inf)) @ v[:, :, head]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 20, 100])
@pytest.mark.parametrize("length", [1, 32, 75, 128])
def test_prefill_attention(length, window, dtype, monkeypatch):
    """One block, several, and a last one that is not full."""
    monkeypatch.setattr(reference, "BLOCK", 32)
    (q, k, v), numbers = draw(length, dtype, (2, length, 4, 16), *[(2, length, 2, 16)] * 2)
    out = prefill_attention(q, k, v, scale=0.25, window=window, implementation="xla")
    assert out.dtype == q.dtype
    expected = causal(*numbers, scale=0.25, window=window)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[dtype])


def test_prefill_attention_has_no_square_buffer():
    import jax

    length = 8192
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    compiled = jax.jit(lambda q, k, v: prefill_attention(q, k, v, scale=1.0)).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


def test_cudnn_says_what_it_cannot_do():
    x = jnp.zeros((1, 4, 1, 64))
    with pytest.raises(ValueError, match=r"got float32 with head dim 64"):
        prefill_attention(x, x, x, scale=1.0, implementation="cudnn")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sliding", [None, 6])
def test_window_scores(sliding, dtype):
    """Rows longer than the window, as long, shorter, and of one token; NaN in the padding."""
    lengths, window, size = np.asarray([30, 8, 3, 1]), 8, 32
    (q, k), (q64, k64) = draw(5, dtype, (4, size, 4, 16), (4, size, 2, 16))
    padding = (np.arange(size) >= lengths[:, None])[..., None, None]
    scores = window_scores(
        jnp.where(padding, jnp.nan, q),
        jnp.where(padding, jnp.nan, k),
        jnp.asarray(lengths, jnp.int32),
        window=window,
        scale=0.25,
        sliding_window=sliding,
    )
    for b, head in np.ndindex(4, 2):
        n, total = lengths[b], np.zeros(size)
        observers = range(max(0, n - window), n)
        for pos in observers:
            first = 0 if sliding is None else max(0, pos - sliding + 1)
            for g in range(2):
                logits = k64[b, first : pos + 1, head] @ q64[b, pos, 2 * head + g] * 0.25
                total[first : pos + 1] += softmax(logits) / (2 * len(observers))
        np.testing.assert_allclose(scores[b, head], total, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_window_scores_as_bare_products(dtype):
    """No mask and no softmax: every observer with every token of its prompt; NaN in the padding."""
    lengths, window, size = np.asarray([30, 8, 3, 1]), 8, 32
    (q, k), (q64, k64) = draw(6, dtype, (4, size, 4, 16), (4, size, 2, 16))
    padding = (np.arange(size) >= lengths[:, None])[..., None, None]
    scores = window_scores(
        jnp.where(padding, jnp.nan, q),
        jnp.where(padding, jnp.nan, k),
        jnp.asarray(lengths, jnp.int32),
        window=window,
        scale=0.25,
        kind="logits",
    )
    for b, head in np.ndindex(4, 2):
        n = lengths[b]
        queries = q64[b, max(0, n - window) : n, 2 * head : 2 * head + 2].reshape(-1, 16)
        products = (queries @ k64[b, :n, head].T).mean(axis=0) * 0.25
        np.testing.assert_allclose(scores[b, head], np.pad(products, (0, size - n)), atol=TOLERANCE[dtype])
