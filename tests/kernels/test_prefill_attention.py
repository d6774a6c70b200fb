"""Prefill attention against float64 NumPy, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import prefill_attention
from kvjax.pallas_kernels.op import Unsupported
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


@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", 100)])
def test_prefill_attention_of_tpus(dtype, window):
    (q, k, v), numbers = draw(1, dtype, (2, 256, 4, 64), *[(2, 256, 2, 64)] * 2)
    out = prefill_attention(q, k, v, scale=0.25, window=window, implementation="tpu", interpret=True)
    assert out.dtype == q.dtype
    expected = causal(*numbers, scale=0.25, window=window)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("implementation", "length", "says"),
    [("gpu", 128, "got float32 with head dim 64"), ("tpu", 75, "75 tokens are not a multiple of 128")],
)
def test_who_cannot_serve_says_why(implementation, length, says):
    x = jnp.zeros((1, length, 1, 64))
    with pytest.raises(Unsupported, match=says):
        prefill_attention(x, x, x, scale=1.0, implementation=implementation, interpret=True)
