"""Bounds of pages as tokens come, by every implementation, against the least and the greatest of all keys of a page."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import DeferredRope, widen_bounds
from kvjax.pallas_kernels.op import Unsupported

BATCH, HEADS, DIM, PAGE, PAGES = 3, 2, 32, 4, 5


@pytest.fixture(params=["xla", "gpu"])
def widen(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""
    return jitted(request.param)


@functools.cache
def jitted(implementation):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(widen_bounds, page=PAGE, **options))


def test_token_after_token(widen):
    """Rows that begin at different places of a page; pages that have no token yet hold NaN."""
    random = np.random.default_rng(0)
    keys = random.normal(size=(BATCH, HEADS, PAGES * PAGE, DIM)).astype(np.float32)
    bounds = to_jax(np.full((BATCH, HEADS, PAGES, 2 * DIM), np.nan), jnp.float32)
    begin = PAGE * np.arange(BATCH)
    for step in range(2 * PAGE - 1):
        pos = begin + step
        key = keys[np.arange(BATCH), :, pos]
        bounds = widen(bounds, to_jax(key), to_jax(pos, jnp.int32))
        now = np.asarray(bounds)
        for row, page in np.ndindex(BATCH, PAGES):
            of_page = keys[row, :, max(page * PAGE, begin[row]) : min((page + 1) * PAGE, pos[row] + 1)]
            got = now[row, :, page]
            if not of_page.shape[1]:
                assert np.isnan(got).all()
            else:
                np.testing.assert_array_equal(got, np.concatenate([of_page.min(axis=1), of_page.max(axis=1)], axis=-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_are_rotated_on_the_way(widen, dtype):
    random = np.random.default_rng(1)
    angle = random.normal(size=(BATCH, DIM // 2))
    key = DeferredRope(
        to_jax(random.normal(size=(BATCH, HEADS, DIM)), dtype),
        *(to_jax(f(angle), jnp.float32) for f in (np.cos, np.sin)),
    )
    pos = to_jax([0, PAGE, 2 * PAGE + 1], jnp.int32)
    bounds = to_jax(np.zeros((BATCH, HEADS, PAGES, 2 * DIM)), dtype)
    got = np.asarray(widen(bounds, key, pos), np.float64)
    turned = np.asarray(jax.jit(DeferredRope.__call__)(key), np.float64)
    tolerance = 1e-6 if dtype == "float32" else 2**-7
    for row in range(BATCH):
        low, high = (turned[row], turned[row]) if row < 2 else (np.minimum(turned[row], 0), np.maximum(turned[row], 0))
        np.testing.assert_allclose(got[row, :, row], np.concatenate([low, high], axis=-1), atol=tolerance)


def test_refusals():
    bounds, key = (to_jax(np.zeros(shape), jnp.float32) for shape in ((1, 1, 1, 96), (1, 1, 48)))
    with pytest.raises(Unsupported, match="head dim 48 is not a power of two"):
        widen_bounds(bounds, key, to_jax([0]), page=4, implementation="gpu", interpret=True)
