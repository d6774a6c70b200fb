"""Similarity inside chunks against float64, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.interpreter import races_found

from kvjax.pallas_kernels import chunk_similarity
from kvjax.pallas_kernels.chunk_similarity import RESOLUTION
from kvjax.pallas_kernels.dispatch import Unsupported

IMPLEMENTATIONS = ["xla", "tpu", "gpu"]


def compute(implementation, *args, **options):
    options |= {"implementation": implementation, "interpret": implementation != "xla"}
    out = jax.block_until_ready(jax.jit(functools.partial(chunk_similarity, **options))(*args))
    assert implementation != "tpu" or not races_found()
    return out


def check(out, keys, live, exact=False):
    """Each edge's cosine, to the resolution, and where it leads: to the first of equals, or to one as similar up to rounding."""
    for chunk in np.ndindex(keys.shape[:-2]):
        key, alive = np.asarray(keys[chunk], np.float64), np.asarray(live[chunk])
        unit = key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), 1e-300)
        cosine = np.where(alive[0::2, None] & alive[1::2], unit[0::2] @ unit[1::2].T, -np.inf)
        best, exists = cosine.max(axis=-1), np.isfinite(cosine).any(axis=-1)
        score, place = np.asarray(out.score[chunk], np.float64), np.asarray(out.place[chunk])
        assert set(zip(score[~exists], place[~exists], strict=True)) <= {(-np.inf, 0)}
        assert not (score[exists] % RESOLUTION).any()
        np.testing.assert_allclose(score[exists], best[exists], atol=0.5 * RESOLUTION + 1e-6)
        chosen = np.take_along_axis(cosine, place[:, None], axis=-1)[:, 0]
        assert (chosen[exists] >= best[exists] - (RESOLUTION + 1e-6)).all()
        if exact:
            assert place.tolist() == np.round(cosine / RESOLUTION).argmax(axis=-1).tolist()


def draw(seed, dtype, chunks, chunk, width):
    random = np.random.default_rng(seed)
    keys = jnp.asarray(random.normal(size=(chunks, chunk, width)), dtype)
    return keys, jnp.asarray(random.random((chunks, chunk)) < np.linspace(0, 1, chunks)[:, None])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestChunkSimilarity:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(("chunk", "dim"), [(64, 128), (1024, 128)])
    def test_edges(self, implementation, chunk, dim, dtype):
        """From chunks with nothing in them to full ones, NaN where there is nothing."""
        keys, live = draw(chunk, dtype, 2 if chunk == 1024 else 5, chunk, dim)
        out = compute(implementation, jnp.where(live[..., None], keys, jnp.nan), live)
        check(out, keys, live)

    def test_the_first_of_equals(self, implementation):
        """Keys with few different directions and many lengths, some of length 0."""
        random = np.random.default_rng(7)
        directions = np.eye(128)[:4] + np.eye(128)[1:5]
        length = 2.0 ** random.integers(-3, 3, size=(5, 32, 1)) * (random.random((5, 32, 1)) < 0.9)
        keys = directions[random.integers(4, size=(5, 32))] * length
        keys, live = jnp.asarray(keys, jnp.float32), jnp.asarray(random.random((5, 32)) < 0.9)
        check(compute(implementation, keys, live), keys, live, exact=True)

    def test_keys_beside_values(self, implementation):
        """Values, NaN here, play no part; leading axes are as they please."""
        keys, _ = draw(8, "float32", 6, 32, 64)
        beside = jnp.concatenate([keys, jnp.full_like(keys, jnp.nan)], axis=-1).reshape(2, 3, 32, 128)
        live = jnp.ones((2, 3, 32), bool)
        check(compute(implementation, beside, live, head_dim=64), keys.reshape(2, 3, 32, 64), live)


def test_worked_example():
    """Four keys: edges lead from the first to the second (.8) and from the third to the second (.96)."""
    keys = jnp.asarray([(1, 0), (0.8, 0.6), (0.6, 0.8), (0, 1)], jnp.float32)
    similarity, target = chunk_similarity(keys, jnp.ones(4, bool))
    np.testing.assert_allclose(similarity, [0.8, 0.96], atol=RESOLUTION)
    assert target.tolist() == [0, 0]


def test_auto_is_xla_on_a_cpu():
    keys, live = draw(9, "float32", 2, 7, 48)
    auto = jax.jit(chunk_similarity)(keys, live)
    xla = jax.jit(lambda *args: chunk_similarity(*args, implementation="xla"))(keys, live)
    assert all((a == b).all() for a, b in zip(auto, xla, strict=True))
    check(auto, keys, live)


@pytest.mark.parametrize(
    ("chunk", "width", "dim", "implementation", "reason"),
    [
        (8, 48, 48, "gpu", "head dim 48 is not a power of two"),
        (7, 64, 64, "gpu", "a chunk of 7 places is not made of pairs"),
        (7, 128, 64, "tpu", "a chunk of 7 places is not made of pairs"),
        (64, 64, 64, "tpu", "64 channels are not whole multiples of 128"),
        (800, 128, 128, "tpu", "a chunk of 800 places is not a multiple of 32, or above 512 of 512"),
        (4096, 128, 128, "tpu", "a chunk of 4096 places is longer than 2048"),
        (8, 96, 64, "gpu", "96 channels are not whole multiples of head dim 64"),
    ],
)
def test_refusals(chunk, width, dim, implementation, reason):
    with pytest.raises(Unsupported, match=reason):
        chunk_similarity(
            jnp.zeros((1, chunk, width)),
            jnp.ones((1, chunk), bool),
            head_dim=dim,
            implementation=implementation,
            interpret=True,
        )
