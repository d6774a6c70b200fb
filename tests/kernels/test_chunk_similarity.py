"""Similarity inside chunks against float64, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found

from kvjax.pallas_kernels import chunk_similarity
from kvjax.pallas_kernels.cluster_merging import RESOLUTION
from kvjax.pallas_kernels.op import Unsupported

IMPLEMENTATIONS = ["xla", "tpu", "gpu"]


def compute(implementation, keys, first, count, chunk):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    compare = functools.partial(chunk_similarity, chunk=chunk, **options)
    out = jax.device_get(jax.jit(compare)(keys, *(to_jax(x, jnp.int32) for x in (first, count))))
    assert implementation != "tpu" or not races_found()
    return out


def check(out, keys, first, count, chunk, exact=False):
    """Each edge's cosine, to the resolution, and where it leads: to the first of equals, or to one as similar up to rounding."""
    batch, heads, places, _ = keys.shape
    keys = np.asarray(keys, np.float64)
    assert out.score.shape == (batch, heads, -(-places // chunk), -(-chunk // 2))
    for row, head, number in np.ndindex(out.score.shape[:3]):
        begin = number * chunk
        alive = begin + np.arange(chunk) < count[row]
        key = np.zeros((chunk, keys.shape[-1]))
        key[alive] = keys[row, head, first[row] + begin :][:chunk][: alive.sum()]
        unit = key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), 1e-300)
        cosine = np.where(alive[0::2, None] & alive[1::2], unit[0::2] @ unit[1::2].T, -np.inf)
        best, exists = cosine.max(axis=-1), np.isfinite(cosine).any(axis=-1)
        score, place = (np.asarray(x[row, head, number]) for x in out)
        assert set(zip(score[~exists], place[~exists], strict=True)) <= {(-np.inf, 0)}
        assert not (score[exists].astype(np.float64) % RESOLUTION).any()
        np.testing.assert_allclose(score[exists], best[exists], atol=0.5 * RESOLUTION + 1e-6)
        chosen = np.take_along_axis(cosine, place[:, None], axis=-1)[:, 0]
        assert (chosen[exists] >= best[exists] - (RESOLUTION + 1e-6)).all()
        if exact:
            assert place.tolist() == np.round(cosine / RESOLUTION).argmax(axis=-1).tolist()


def draw(seed, dtype, places, first, count, dim, heads=1):
    """Normal keys, NaN before each row's first chunk and after its last key."""
    keys = np.random.default_rng(seed).normal(size=(len(first), heads, places, dim))
    at, first, count = np.arange(places), np.asarray(first)[:, None], np.asarray(count)[:, None]
    return to_jax(np.where(((at >= first) & (at < first + count))[:, None, :, None], keys, np.nan), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestChunkSimilarity:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("chunk", "places", "first", "count", "dim"),
        [
            (64, 130, [0, 1, 2, 0], [130, 128, 65, 0], 128),
            (64, 130, [0, 5], [130, 33], 64),
            (1024, 1024, [0], [1000], 128),
        ],
    )
    def test_edges(self, implementation, chunk, places, first, count, dim, dtype):
        """Rows with nothing in them and full ones, and chunks that begin after the first place and end within a pair."""
        keys = draw(chunk, dtype, places, first, count, dim, heads=2 if chunk == 64 else 1)
        check(compute(implementation, keys, first, count, chunk), keys, first, count, chunk)

    def test_the_first_of_equals(self, implementation):
        """Keys with few different directions and many lengths, some of length 0."""
        random = np.random.default_rng(7)
        directions = np.eye(128)[:4] + np.eye(128)[1:5]
        length = 2.0 ** random.integers(-3, 3, size=(2, 1, 96, 1)) * (random.random((2, 1, 96, 1)) < 0.9)
        keys = to_jax(directions[random.integers(4, size=(2, 1, 96))] * length, jnp.float32)
        case = [0, 4], [96, 75], 32
        check(compute(implementation, keys, *case), keys, *case, exact=True)


def test_worked_example():
    """Four keys: edges lead from the first to the second (.8) and from the third to the second (.96)."""
    keys = to_jax([[[(1, 0), (0.8, 0.6), (0.6, 0.8), (0, 1)]]], jnp.float32)
    similarity, target = chunk_similarity(keys, to_jax([0]), to_jax([4]), 4)
    np.testing.assert_allclose(similarity, [[[[0.8, 0.96]]]], atol=RESOLUTION)
    assert target.tolist() == [[[[0, 0]]]]


def test_auto_is_xla_on_a_cpu():
    case = [0, 2], [14, 12], 7
    keys = draw(9, "float32", 14, *case[:2], 48)
    auto, xla = compute("auto", keys, *case), compute("xla", keys, *case)
    assert all((a == b).all() for a, b in zip(auto, xla, strict=True))
    check(auto, keys, *case)


@pytest.mark.parametrize(
    ("chunk", "dim", "implementation", "reason"),
    [
        (8, 48, "gpu", "head dim 48 is not a power of two"),
        (7, 64, "gpu", "a chunk of 7 slots is odd"),
        (7, 128, "tpu", "a chunk of 7 slots is odd"),
        (800, 128, "tpu", "a chunk of 800 slots is not a multiple of 32, or of 512 if above 512"),
        (4096, 128, "tpu", "a chunk of 4096 slots is longer than 2048"),
    ],
)
def test_refusals(chunk, dim, implementation, reason):
    with pytest.raises(Unsupported, match=reason):
        compute(implementation, to_jax(np.zeros((1, 1, chunk, dim))), [0], [chunk], chunk)
