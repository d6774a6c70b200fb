"""Bounds of a query's products with the keys of a page, by every implementation, against loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import DeferredRope, page_scores
from kvjax.pallas_kernels.block_scores import pallas_triton
from kvjax.pallas_kernels.op import Unsupported

PAGE = 4


@pytest.fixture(params=["xla", "gpu"])
def compute(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""
    return jitted(request.param)


@functools.cache
def jitted(implementation):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(page_scores, page=PAGE, **options))


def draw(heads, kv_heads, pages, dim, count, dtype="float32"):
    """Normal queries; bounds of random keys, NaN beyond each row's `count` pages."""
    random = np.random.default_rng(pages)
    batch = len(count)
    q = random.normal(size=(batch, heads, dim))
    ends = np.sort(random.normal(size=(2, batch, kv_heads, pages, dim)), axis=0)
    bounds = np.concatenate(list(ends), axis=-1)
    bounds[np.broadcast_to((np.arange(pages) >= np.asarray(count)[:, None])[:, None], bounds.shape[:3])] = np.nan
    return (
        to_jax(q, dtype),
        to_jax(bounds, dtype),
        to_jax([max(PAGE * n - 3, 0) for n in count], jnp.int32),
    )


def check(out, inputs, tolerance):
    q, bounds, tokens = (np.asarray(x, np.float64) for x in inputs)
    (batch, heads, _), (kv_heads, pages) = q.shape, bounds.shape[1:3]
    assert out.shape == (batch, heads, pages)
    assert out.dtype == jnp.float32
    out = np.asarray(out)
    for row, head in np.ndindex(batch, heads):
        low, high = np.split(bounds[row, head // (heads // kv_heads)], 2, axis=-1)
        best = np.maximum(q[row, head] * low, q[row, head] * high).sum(axis=-1)
        there = PAGE * np.arange(pages) < tokens[row]
        np.testing.assert_allclose(out[row, head][there], best[there], atol=tolerance)
        assert (out[row, head][~there] == -np.inf).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "pages", "dim", "count"),
    [(4, 2, 19, 16, [19, 0, 7]), (2, 2, 64, 32, [64, 63]), (8, 1, 130, 16, [130, 65]), (12, 2, 19, 16, [19, 7])],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-4)])
def test_equals_loops(compute, heads, kv_heads, pages, dim, count, dtype, tolerance):
    """Products of bfloat16 are exact in float32, in which they are summed."""
    inputs = draw(heads, kv_heads, pages, dim, count, dtype)
    check(compute(*inputs), inputs, tolerance)


def test_queries_are_rotated_on_the_way(compute):
    q, bounds, tokens = draw(6, 2, 19, 16, [19, 7])
    angle = np.random.default_rng(5).normal(size=(2, 8))
    q = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
    check(compute(q, bounds, tokens), (jax.jit(DeferredRope.__call__)(q), bounds, tokens), 1e-5)


def test_blocks_of_pages():
    inputs = draw(6, 2, 50, 16, [50, 33])
    check(pallas_triton.page_scores(*inputs, page=PAGE, interpret=True, sizes={"pages": 16, "warps": 1}), inputs, 1e-5)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "reason"),
    [
        (2, 24, "float32", "head dim 24 is not a power of two from 16 to 256"),
        (2, 16, "float16", "queries are float16 and bounds float32"),
    ],
)
def test_refusals(heads, dim, dtype, reason):
    q, bounds, count = draw(heads, 1, 4, dim, [4])
    with pytest.raises(Unsupported, match=reason):
        page_scores(to_jax(q, dtype), bounds, count, page=PAGE, implementation="gpu", interpret=True)
