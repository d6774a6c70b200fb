"""Prefill attention against float64 NumPy, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Stripes, block_attention, partial_block_attention, prefill_attention
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.prefill_attention import block_attention_pallas_mosaic_tpu, reference

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


def block_case(seed, dtype, batch, size, slots, heads, kv_heads, dim):
    """Slots in any order, some of them free and holding NaN, as many live ones in each head as chance has it; weights of clusters."""
    random = np.random.default_rng(seed)
    arrays, numbers = draw(seed, dtype, (batch, size, heads, dim), *[(batch, kv_heads, slots, dim)] * 2)
    pos = np.stack([[random.permutation(3 * slots)[:slots] for _ in range(kv_heads)] for _ in range(batch)])
    live = random.random((batch, kv_heads, slots)) < random.random((batch, kv_heads, 1))
    pos = np.where(live, pos, -1).astype(np.int32)
    q_pos = (random.integers(0, 3 * slots, (batch, 1)) + np.arange(size)).astype(np.int32)
    q_pos[0, size // 2 :] = -1
    weight = random.integers(1, 50, pos.shape).astype(np.float32)
    q, k, v = arrays
    k, v = (jnp.where(live[..., None], x, jnp.nan) for x in (k, v))
    return (q, k, v, jnp.asarray(q_pos), jnp.asarray(pos), jnp.asarray(weight)), numbers


def over_slots(numbers, q_pos, pos, weight, scale, window):
    """Every query over the slots it can see, in float64."""
    q, k, v = numbers
    heads, kv_heads = q.shape[2], k.shape[1]
    out = np.zeros(q.shape)
    for b, s, n in np.ndindex(*q.shape[:3]):
        head = n // (heads // kv_heads)
        distance = q_pos[b, s] - pos[b, head]
        seen = (pos[b, head] >= 0) & (distance >= 0) & (distance < (10**9 if window is None else window))
        if seen.any():
            logits = k[b, head, seen] @ q[b, s, n] * scale + np.log(weight[b, head, seen])
            out[b, s, n] = softmax(logits) @ v[b, head, seen]
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("size", "slots"), [(1, 5), (7, 32), (16, 75)])
def test_block_attention(size, slots, window, dtype, monkeypatch):
    """One block of slots, several, and a last one that overlaps; with weights and without."""
    monkeypatch.setattr(reference, "SLOTS", 32)
    (*args, weight), numbers = block_case(slots, dtype, 3, size, slots, 4, 2, 16)
    q_pos, pos = (np.asarray(x) for x in args[3:])
    for weights in (None, weight):
        out = block_attention(*args, weights, scale=0.25, window=window, implementation="xla")
        assert out.dtype == args[0].dtype
        told = np.ones(pos.shape) if weights is None else np.asarray(weights)
        expected = over_slots(numbers, q_pos, pos, told, 0.25, window)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "window", "dim"), [("float32", None, 64), ("bfloat16", 200, 128)])
def test_block_attention_of_tpus(dtype, window, dim, monkeypatch):
    """Several tiles of queries and of slots, the last of each not full, some of which nobody sees."""
    monkeypatch.setattr(block_attention_pallas_mosaic_tpu, "ROWS", 32)
    monkeypatch.setattr(block_attention_pallas_mosaic_tpu, "SLOTS", 128)
    (*args, weight), numbers = block_case(1, dtype, 2, 20, 300, 4, 2, dim)
    q_pos, pos = (np.asarray(x) for x in args[3:])
    for weights in (None, weight):
        out = block_attention(*args, weights, scale=0.125, window=window, implementation="tpu", interpret=True)
        told = np.ones(pos.shape) if weights is None else np.asarray(weights)
        expected = over_slots(numbers, q_pos, pos, told, 0.125, window)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("implementation", "dtype", "window"),
    [("xla", "float32", 200), ("tpu", "float32", None), pytest.param("tpu", "bfloat16", 200, marks=pytest.mark.slow)],
)
def test_partial_block_attention(implementation, dtype, window, monkeypatch):
    """Sums of exponentials of each part, by which the parts' values add up to those over all slots."""
    monkeypatch.setattr(block_attention_pallas_mosaic_tpu, "ROWS", 32)
    monkeypatch.setattr(block_attention_pallas_mosaic_tpu, "SLOTS", 128)
    (q, k, v, q_pos, pos, weight), numbers = block_case(2, dtype, 2, 20, 300, 4, 2, 64)
    told = np.asarray(q_pos), np.asarray(pos), np.asarray(weight)
    total, joined, empty = 0.0, 0.0, 0
    for part in (slice(0, 7), slice(7, 140), slice(140, 300)):
        given = k[:, :, part], v[:, :, part], q_pos, pos[:, :, part], weight[:, :, part]
        options = {"implementation": implementation, "interpret": implementation == "tpu"}
        out, sums = partial_block_attention(q, *given, scale=0.125, window=window, **options)
        assert (out.dtype, sums.dtype) == (q.dtype, jnp.float32)
        sums = np.asarray(sums, np.float64)
        expected = sums_over_slots(numbers, *told[:1], *(x[:, :, part] for x in told[1:]), part, 0.125, window)
        np.testing.assert_allclose(sums, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert not np.asarray(out, np.float64)[np.isneginf(expected)].any()
        total, joined = total + np.exp(sums), joined + np.exp(sums)[..., None] * np.asarray(out, np.float64)
        empty += np.isneginf(expected).sum()
    assert empty, "some part has nothing for some query"
    joined /= np.where(total > 0, total, 1)[..., None]
    expected = over_slots(numbers, *told, 0.125, window)
    np.testing.assert_allclose(joined, expected, atol=2 * TOLERANCE[dtype])


def sums_over_slots(numbers, q_pos, pos, weight, part, scale, window):
    """The logarithm of each query's sum of weighted exponentials over the slots of a part, in float64."""
    q, k, _ = numbers
    out = np.full(q.shape[:3], -np.inf)
    for b, s, n in np.ndindex(*out.shape):
        head = n // (q.shape[2] // k.shape[1])
        distance = q_pos[b, s] - pos[b, head]
        seen = (pos[b, head] >= 0) & (distance >= 0) & (distance < (10**9 if window is None else window))
        logits = k[b, head, part][seen] @ q[b, s, n] * scale
        out[b, s, n] = np.logaddexp.reduce(logits + np.log(weight[b, head, seen]), initial=-np.inf)
    return out


@pytest.mark.parametrize(("width", "parts"), [(16, 3), (4, 2), (1, 5)])
def test_stripes(width, parts):
    """Against a count of all slots, dealt one by one."""
    slot = jnp.arange(200, dtype=jnp.int32)
    for part in range(parts):
        stripes = Stripes(width, parts, jnp.asarray(part, jnp.int32))
        mine = [i for i in range(200) if i // width % parts == part]
        np.testing.assert_array_equal(stripes.among_all(slot[: len(mine)]), mine)
        np.testing.assert_array_equal(stripes.below(slot), [sum(m < i for m in mine) for i in range(200)])
