"""Attention operations against float64 NumPy, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import decode_attention, prefill_attention, window_scores
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 2, 64), (8, 1, 128)])
def test_decode_attention(heads, kv_heads, dim, dtype):
    """Ragged: free slots anywhere, clusters of several tokens, one slot, none; free slots hold NaN."""
    batch, slots = 4, 40
    (q, k, v), (q64, k64, v64) = draw(0, dtype, (batch, heads, dim), *[(batch, kv_heads, slots, dim)] * 2)
    random = np.random.default_rng(1)
    weight = random.integers(0, 5, size=(batch, kv_heads, slots)).astype(np.float32)
    weight[1] = np.arange(slots) == 7
    weight[2] = 0
    free = weight[..., None] == 0
    out, probs = decode_attention(
        q, jnp.where(free, jnp.nan, k), jnp.where(free, jnp.nan, v), jnp.asarray(weight), scale=dim**-0.5
    )
    assert out.dtype == q.dtype
    for b in range(batch):
        for n in range(heads):
            head = n // (heads // kv_heads)
            live = weight[b, head] > 0
            if live.any():
                logits = k64[b, head] @ q64[b, n] * dim**-0.5
                expected = softmax(logits[live] + np.log(weight[b, head, live])) @ v64[b, head, live]
            else:
                expected = np.zeros(dim)
            np.testing.assert_allclose(np.asarray(out[b, n], np.float64), expected, atol=TOLERANCE[dtype])
    grouped = q64.reshape(batch, kv_heads, -1, dim)
    for b, head in np.ndindex(batch, kv_heads):
        live = weight[b, head] > 0
        expected = np.zeros(slots)
        if live.any():
            logits = grouped[b, head] @ k64[b, head].T * dim**-0.5
            expected[live] = softmax(logits[:, live] + np.log(weight[b, head, live])).mean(axis=0)
        np.testing.assert_allclose(np.asarray(probs[b, head]), expected, atol=TOLERANCE[dtype])


def test_a_cluster_counts_like_its_tokens():
    (q, k, v), _ = draw(2, "float32", (1, 2, 8), (1, 1, 5, 8), (1, 1, 5, 8))
    counts = np.asarray([1, 3, 2, 1, 4])
    merged, _ = decode_attention(q, k, v, jnp.asarray(counts, jnp.float32)[None, None], scale=0.3)
    spread = [jnp.repeat(x, counts, axis=2) for x in (k, v)]
    apart, _ = decode_attention(q, *spread, jnp.ones((1, 1, 11)), scale=0.3)
    np.testing.assert_allclose(merged, apart, atol=1e-6)


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
