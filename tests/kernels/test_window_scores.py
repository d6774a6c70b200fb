"""Observation-window scores, by every implementation, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found

from kvjax.pallas_kernels import window_scores
from kvjax.pallas_kernels.op import Unsupported
from kvjax.pallas_kernels.window_scores import reference, window_scores_pallas_triton
from kvjax.pallas_kernels.window_scores.types import Observers

SCALE = 0.25


def draw(seed, size, heads, kv_heads, dim, dtype):
    """Rows as long as the prompt, shorter, of one token and of none, with NaN in the padding; and a middle of each."""
    random = np.random.default_rng(seed)
    lengths = np.asarray([size, random.integers(2, size), 3, 1, 0])
    padding = (np.arange(size) >= lengths[:, None])[..., None, None]
    q, k = (np.where(padding, np.nan, random.normal(size=(5, size, n, dim))) for n in (heads, kv_heads))
    first = np.minimum(random.integers(0, 9, 5), lengths)
    count = random.integers(0, lengths - first + 1)
    return to_jax(q, dtype), to_jax(k, dtype), *(to_jax(x, jnp.int32) for x in (lengths, first, count))


def expected(q, k, lengths, first, count, window, sliding, chunk):
    """Scores, query by query; of a chunk, each query gives what it gives to the best token."""
    q, k, lengths, first, count = (np.asarray(x) for x in (q, k, lengths, first, count))
    q, k = q.astype(np.float64), k.astype(np.float64)
    batch, size, kv_heads, _ = k.shape
    group, chunks = q.shape[2] // kv_heads, -(-size // chunk)
    scores = np.zeros((batch, kv_heads, chunks))
    for b, h in np.ndindex(batch, kv_heads):
        n, start = int(lengths[b]), int(first[b])
        observers = range(max(0, n - window), n)
        for pos in observers:
            low = start if sliding is None else max(start, pos - sliding + 1)
            high = min(start + int(count[b]), n, pos + 1)
            given = np.zeros(chunks * chunk)
            if low < high:
                weights = np.exp(q[b, pos, h * group : (h + 1) * group] @ k[b, low:high, h].T * SCALE)
                given[low - start : high - start] = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
            scores[b, h] += given.reshape(chunks, chunk).max(axis=1) / len(observers)
    return scores


SHAPES = {
    # size, heads, KV heads, dim, window, sliding window, chunk, a middle, dtype
    "three heads a group": (130, 6, 2, 64, 5, None, 1, False, "bfloat16"),
    "chunks of a middle": (70, 4, 4, 128, 16, None, 4, True, "float32"),
    "blocks, chunks of a sliding window": (300, 4, 1, 128, 4, 150, 8, True, "bfloat16"),
}


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
class TestWindowScores:
    @pytest.mark.parametrize("name", SHAPES)
    def test_equals_attention_of_the_last_queries(self, name, implementation, monkeypatch):
        monkeypatch.setattr(reference, "BLOCK", 128)
        size, heads, kv_heads, dim, window, sliding, chunk, middle, dtype = SHAPES[name]

        @jax.jit
        def compute(q, k, lengths, *part):
            return window_scores(
                q,
                k,
                lengths,
                window=window,
                scale=SCALE,
                sliding_window=sliding,
                middle=part or None,
                chunk=chunk,
                implementation=implementation,
                interpret=implementation != "xla",
            )

        for seed in range(1 if implementation == "tpu" else 4):
            q, k, lengths, first, count = draw(seed, size, heads, kv_heads, dim, dtype)
            if not middle:
                first, count = np.zeros(len(lengths), np.int32), lengths
            found = compute(q, k, lengths, *((first, count) if middle else ()))
            wanted = expected(q, k, lengths, first, count, window, sliding, chunk)
            np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=2e-5)
        assert implementation != "tpu" or not races_found()


def test_programs_share_the_tokens():
    """Several blocks, parts of them, and tiles of queries."""
    q, k, lengths, _, _ = draw(5, 70, 8, 2, 64, "float32")
    none = to_jax(np.zeros(len(lengths), np.int32))
    observers = jax.jit(Observers.of, static_argnums=(2, 3))(q, lengths, 8, 2)
    options = {"scale": SCALE, "sliding_window": None, "chunk": 2, "interpret": True}
    sizes = {"rows": 16, "block": 16, "splits": 3, "warps": 4, "stages": 1}
    total = window_scores_pallas_triton.window_scores(observers, k, none, lengths, sizes=sizes, **options)
    wanted = expected(q, k, lengths, none, lengths, 8, None, 2) * np.asarray(observers.size)[:, None, None]
    np.testing.assert_allclose(total, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bare_products(dtype):
    """No mask and no softmax: every observer with every token of its prompt."""
    q, k, lengths, _, _ = draw(6, 32, 4, 2, 16, dtype)
    scores = jax.jit(lambda *args: window_scores(*args, window=8, scale=SCALE, kind="logits"))(q, k, lengths)
    scores, lengths, q, k = (
        np.asarray(scores),
        np.asarray(lengths),
        np.asarray(q, np.float64),
        np.asarray(k, np.float64),
    )
    for b, head in np.ndindex(*scores.shape[:2]):
        n = int(lengths[b])
        wanted = np.zeros(32)
        if n:
            queries = q[b, max(0, n - 8) : n, 2 * head : 2 * head + 2].reshape(-1, 16)
            wanted[:n] = (queries @ k[b, :n, head].T).mean(axis=0) * SCALE
        np.testing.assert_allclose(scores[b, head], wanted, atol=2e-6)


def test_long_prompts_need_no_room_for_every_query():
    shapes = [jax.ShapeDtypeStruct((1, 8192, n, 16), jnp.float32) for n in (8, 1)]
    compiled = (
        jax.jit(lambda q, k, lengths: window_scores(q, k, lengths, window=32, scale=SCALE))
        .lower(*shapes, jax.ShapeDtypeStruct((1,), jnp.int32))
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 32 * 8192 * 4 / 4


def test_what_is_refused():
    q, k, lengths, first, count = draw(0, 16, 2, 2, 80, "float32")
    with pytest.raises(ValueError, match=r"kind='logits' does not support chunk=4 or `middle`\. Use kind='softmax'"):
        window_scores(q, k, lengths, window=4, scale=SCALE, kind="logits", chunk=4)
    reasons = {"tpu": "2 KV heads of 80 channels do not fill", "gpu": "head dim 80 is not a power of two"}
    for implementation, reason in reasons.items():
        with pytest.raises(Unsupported, match=reason):
            window_scores(q, k, lengths, window=4, scale=SCALE, implementation=implementation, interpret=True)
    k = to_jax(np.zeros((5, 16, 2, 64)), jnp.float32)
    for implementation in reasons:
        with pytest.raises(Unsupported, match="a chunk of 3 tokens is not a power of two"):
            window_scores(k, k, lengths, window=4, scale=SCALE, chunk=3, implementation=implementation, interpret=True)
        with pytest.raises(Unsupported, match=f"this program is for cpu, not for a {implementation}"):
            window_scores(k, k, lengths, window=4, scale=SCALE, implementation=implementation)
