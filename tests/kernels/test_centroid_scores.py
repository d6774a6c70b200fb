"""Products with centroids, by every implementation, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import DeferredRope, centroid_scores
from kvjax.pallas_kernels.block_scores import pallas_triton
from kvjax.pallas_kernels.op import Unsupported


@pytest.fixture(params=["xla", "gpu"])
def compute(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""
    return jitted(request.param)


@functools.cache
def jitted(implementation):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(centroid_scores, **options))


def draw(seed, batch, heads, kv_heads, count, dim, dtype="float32"):
    random = np.random.default_rng(seed)
    q = to_jax(random.normal(size=(batch, heads, dim)), dtype)
    return q, to_jax(random.normal(size=(batch, kv_heads, count, dim)), jnp.float32)


def check(out, q, centroids):
    q, centroids = (np.asarray(x, np.float64) for x in (q, centroids))
    grouped = q.reshape(*centroids.shape[:2], -1, q.shape[-1])
    np.testing.assert_allclose(out, np.einsum("bkgh,bkmh->bkgm", grouped, centroids), atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "dim"), [(4, 2, 19, 32), (2, 2, 64, 16), (8, 1, 130, 16), (7, 1, 33, 16)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_products(compute, heads, kv_heads, count, dim, dtype):
    """Queries of either type, multiplied as float32."""
    q, centroids = draw(count, 2, heads, kv_heads, count, dim, dtype)
    check(compute(q, centroids), q, centroids)


def test_queries_are_rotated_on_the_way(compute):
    q, centroids = draw(1, 3, 4, 2, 21, 32)
    angle = np.random.default_rng(2).normal(size=(3, 16))
    q = DeferredRope(q, to_jax(np.cos(angle), jnp.float32), to_jax(np.sin(angle), jnp.float32))
    check(compute(q, centroids), jax.jit(DeferredRope.__call__)(q), centroids)


def test_blocks_of_centroids():
    q, centroids = draw(3, 2, 4, 2, 50, 16)
    check(
        pallas_triton.centroid_scores(q, centroids, interpret=True, sizes={"centroids": 16, "warps": 1}), q, centroids
    )


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "reason"),
    [
        (2, 24, "float32", "head dim 24 is not a power of two from 16 to 256"),
        (2, 16, "bfloat16", "centroids are bfloat16"),
    ],
)
def test_refusals(heads, dim, dtype, reason):
    q, centroids = draw(4, 1, heads, 1, 4, dim)
    with pytest.raises(Unsupported, match=reason):
        centroid_scores(q, to_jax(centroids, dtype), implementation="gpu", interpret=True)
