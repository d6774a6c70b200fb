"""Prefill attention against float64 NumPy, written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.lowering import on

from kvjax.pallas_kernels import Stripes, block_attention, partial_block_attention, prefill_attention
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.prefill_attention import block_attention_pallas_mosaic_tpu, cudnn, reference

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def draw(seed, dtype, *shapes):
    """Random arrays of this type, and the same numbers in float64."""
    random = np.random.default_rng(seed)
    arrays = [to_jax(random.normal(size=shape), dtype) for shape in shapes]
    return arrays, [np.asarray(a, np.float64) for a in arrays]


def fresh(function, *args, **options):
    """By a program of its own, which is traced with the sizes that a test has set."""
    return jax.jit(functools.partial(function, **options))(*args)


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
    out = fresh(prefill_attention, q, k, v, scale=0.25, window=window, implementation="xla")
    assert out.dtype == q.dtype
    expected = causal(*numbers, scale=0.25, window=window)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[dtype])


def test_prefill_attention_has_no_square_buffer():
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
    x = to_jax(np.zeros((1, length, 1, 64)), jnp.float32)
    with pytest.raises(Unsupported, match=says):
        prefill_attention(x, x, x, scale=1.0, implementation=implementation, interpret=True)


@pytest.mark.parametrize(("kind", "largest"), [("NVIDIA H100 80GB HBM3", 256), ("NVIDIA A100-SXM4-80GB", 128)])
def test_head_dims_of_cudnn(kind, largest):
    """cuDNN has larger heads on Hopper GPUs."""
    with on(kind):
        for dim, supported in ((largest, True), (largest + 8, False)):
            x = jnp.zeros((1, 4, 1, dim), jnp.bfloat16)
            reason = cudnn.unsupported_reason(x, x, x)
            assert reason is None if supported else f"up to {largest}" in str(reason)


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
    k, v = (to_jax(np.where(live[..., None], x, np.asarray(np.nan, x.dtype))) for x in (k, v))
    return (q, k, v, to_jax(q_pos), to_jax(pos), to_jax(weight)), numbers


def over_slots(numbers, q_pos, pos, weight, scale, window):
    """Every query over the slots it can see, in float64."""
    q, k, v = numbers
    heads, kv_heads = q.shape[2], k.shape[1]
    out = np.zeros(q.shape)
    for b, n in np.ndindex(len(q), heads):
        head = n // (heads // kv_heads)
        distance = q_pos[b, :, None] - pos[b, head]
        seen = (pos[b, head] >= 0) & (distance >= 0) & (distance < (10**9 if window is None else window))
        any_ = seen.any(axis=1)
        logits = q[b, any_, n] @ k[b, head].T * scale + np.log(weight[b, head])
        out[b, any_, n] = softmax(np.where(seen[any_], logits, -np.inf)) @ v[b, head]
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
        out = fresh(block_attention, *args, weights, scale=0.25, window=window, implementation="xla")
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
        options = {"scale": 0.125, "window": window, "implementation": "tpu", "interpret": True}
        out = fresh(block_attention, *args, weights, **options)
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
    k, v = np.asarray(k), np.asarray(v)
    total, joined, empty = 0.0, 0.0, 0
    for part in (slice(0, 7), slice(7, 140), slice(140, 300)):
        given = [to_jax(x[:, :, part]) for x in (k, v, *told[1:])]
        given.insert(2, q_pos)
        options = {"implementation": implementation, "interpret": implementation == "tpu"}
        out, sums = fresh(partial_block_attention, q, *given, scale=0.125, window=window, **options)
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
    """Against a count of all slots, sharded one by one."""
    slot = np.arange(200, dtype=np.int32)

    @jax.jit
    def both(part, slot, some):
        stripes = Stripes(width, parts, part)
        return stripes.among_all(some), stripes.below(slot)

    for part in range(parts):
        mine = [i for i in range(200) if i // width % parts == part]
        among_all, below = both(np.int32(part), slot, slot)
        np.testing.assert_array_equal(among_all[: len(mine)], mine)
        np.testing.assert_array_equal(below, [sum(m < i for m in mine) for i in range(200)])
