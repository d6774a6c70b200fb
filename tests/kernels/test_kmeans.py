"""k-means against Lloyd's algorithm in float64, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found
from policies.oracle_clusterkv import kmeans as lloyd

from kvjax.pallas_kernels import kmeans
from kvjax.pallas_kernels.kmeans.kmeans_pallas_triton import moved, parts
from kvjax.pallas_kernels.kmeans.lloyd import Members
from kvjax.pallas_kernels.op import Unsupported

IMPLEMENTATIONS = ["xla", "tpu", "gpu"]


def cluster(implementation, x, init, iterations, distance="cosine", mask=None, clusters=None):
    batch, _, tokens, _ = x.shape
    mask = to_jax(np.ones((batch, tokens), bool) if mask is None else mask)
    clusters = to_jax(np.full(batch, init.shape[2]) if clusters is None else clusters, jnp.int32)
    work = clustering(implementation, iterations, distance)
    out = jax.device_get(work(to_jax(x), mask, to_jax(init), clusters))
    assert implementation != "tpu" or not races_found()
    return out


@functools.cache
def clustering(implementation, iterations, distance):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(kmeans, iterations=iterations, distance=distance, **options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestKmeans:
    @pytest.mark.parametrize("distance", ["cosine", "l2", "ip"])
    def test_is_lloyds(self, distance, implementation):
        """A ragged batch, with fewer clusters in some rows and NaN where there is no token."""
        random = np.random.default_rng(5)
        x = random.normal(size=(6, 1, 40, 16)).astype(np.float32)
        init = random.normal(size=(6, 1, 7, 16)).astype(np.float32)
        lengths, clusters = np.asarray([40, 17, 3, 1, 33, 0]), np.asarray([7, 4, 3, 1, 6, 0])
        mask = np.arange(40) < lengths[:, None]
        poisoned = np.where(mask[:, None, :, None], x, np.nan)
        centroids, labels = cluster(implementation, poisoned, init, 2, distance, mask, clusters)
        for row, head in np.ndindex(6, 1):
            n, m = lengths[row], clusters[row]
            want, want_labels = lloyd(x[row, head, :n].astype(np.float64), init[row, head, :m], 2, distance)
            np.testing.assert_allclose(centroids[row, head, :m], want, atol=1e-5)
            np.testing.assert_array_equal(centroids[row, head, m:], init[row, head, m:])
            assert labels[row, head].tolist() == [*want_labels, *[7] * (40 - n)]

    def test_many_tokens_and_clusters_go_block_by_block(self, implementation):
        """Neither is a whole number of blocks: the same clusters as at once."""
        random = np.random.default_rng(6)
        x = random.normal(size=(1, 1, 600, 64)).astype(np.float32)
        init = x[:, :, :140]
        centroids, labels = cluster(implementation, x, init, 1)
        want, want_labels = lloyd(x[0, 0].astype(np.float64), init[0, 0], 1, "cosine")
        np.testing.assert_allclose(centroids[0, 0], want, atol=1e-5)
        assert labels[0, 0].tolist() == want_labels

    def test_sixteen_bits(self, implementation):
        """Tokens are compared with rounded centroids, and added up exactly."""
        random = np.random.default_rng(7)
        x, init = (random.normal(size=(1, 2, n, 128)).astype(jnp.bfloat16) for n in (90, 20))
        centroids, labels = cluster(implementation, x, init, 1)
        for head in range(2):
            points = np.asarray(x[0, head], np.float64)
            for given, found in ((init[0, head], None), (centroids[0, head], labels[0, head])):
                direction = np.asarray(given, np.float32)
                direction = direction / np.linalg.norm(direction, axis=-1, keepdims=True)
                scores = points @ direction.astype(jnp.bfloat16).astype(np.float64).T
                if found is None:
                    nearest = scores.argmax(axis=-1)
                else:
                    chosen = np.take_along_axis(scores, np.asarray(found)[:, None], axis=-1)[:, 0]
                    np.testing.assert_allclose(chosen, scores.max(axis=-1), atol=1e-4)
            for c in range(20):
                mean = points[nearest == c].mean(axis=0) if (nearest == c).any() else np.asarray(init[0, head, c])
                np.testing.assert_allclose(centroids[0, head, c], mean, atol=1e-5)

    def test_an_empty_cluster_keeps_its_mean(self, implementation):
        x, init = np.zeros((1, 1, 2, 16), np.float32), np.zeros((1, 1, 2, 16), np.float32)
        x[0, 0, :, :2], init[0, 0, :, :2] = [[1, 0], [2, 0.1]], [[1, 0], [-1, -1]]
        centroids, labels = cluster(implementation, x, init, 1)
        np.testing.assert_allclose(centroids[0, 0, :, :2], [[1.5, 0.05], [-1, -1]])
        assert labels.tolist() == [[[0, 0]]]


total_of = jax.jit(functools.partial(moved, interpret=True))


def total(*args):
    return jax.device_get(total_of(*args))


def channels_apart(random, tokens, dtype):
    """Tokens [2, 2, T, 16], channels of very different sizes, one of zeros."""
    x = random.normal(size=(2, 2, tokens, 16)) * 10.0 ** random.integers(-6, 6, size=(2, 2, 1, 16))
    x[..., 3] = 0
    return x.astype(jnp.dtype(dtype))


def members(x, size):
    """Of `size` clusters without tokens."""
    shape = *x.shape[:2], size
    return Members(
        np.full(x.shape[:3], size, np.int32),
        np.zeros((*x.shape[:2], parts(x.dtype), size, x.shape[3]), np.float32),
        np.zeros(shape, np.float32),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
class TestSumsOnGpus:
    def test_do_not_depend_on_the_order_of_tokens(self, dtype):
        """To the last bit, with NaN where there is no token."""
        random = np.random.default_rng(11)
        x, labels = channels_apart(random, 500, dtype), random.integers(0, 8, size=(2, 2, 500)) % 7
        x[labels == 6] = np.nan
        largest = np.nanmax(np.abs(x.astype(np.float32)), axis=2)
        order = random.permutation(500)
        found = total(to_jax(x), largest, labels, members(x, 6))
        again = total(to_jax(x[:, :, order]), largest, labels[:, :, order], members(x, 6))
        np.testing.assert_array_equal(found.sums, again.sums)
        for place in np.ndindex(2, 2):
            for c in range(6):
                mine = x[place][labels[place] == c].astype(np.float64)
                assert found.counts[*place, c] == len(mine)
                # Room for 256 tokens leaves 14 bits below the largest value, half of the last of which rounding may take.
                bound = largest[place] * len(mine) * (2.0**-14 if dtype == "bfloat16" else 2.0**-23)
                assert (np.abs(np.sum(found.sums, axis=2)[*place, c] - mine.sum(axis=0)) <= bound).all()

    def test_do_not_depend_on_where_tokens_were_before(self, dtype):
        """To the last bit, whether a few change their cluster, or so many that sums begin anew in one head, or in all."""
        random = np.random.default_rng(12)
        x = channels_apart(random, 400, dtype)
        largest, before = np.max(np.abs(x.astype(np.float32)), axis=2), members(x, 6)
        labels = np.sort(random.integers(0, 6, size=(2, 2, 400)))
        for change in ("none", "few", "one head", "all"):
            if change == "few":
                labels = np.where(random.random(labels.shape) < 0.1, random.integers(0, 7, size=labels.shape), labels)
            elif change == "one head":
                labels[1, 0, :350] = 2
            elif change == "all":
                labels = labels // 4
            before = total(to_jax(x), largest, to_jax(labels), before)
            afresh = total(to_jax(x), largest, to_jax(labels), members(x, 6))
            for got, want in zip(before, afresh, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=change)


def test_distances_differ():
    """The same keys and start, three ways: by direction, by place, and by length."""
    x = to_jax([[[[1.0, 0.4], [10, 0], [0, 1]]]])
    init = to_jax([[[[6.0, 0], [0.5, 1]]]])
    assert [cluster("xla", x, init, 1, d)[1][0, 0].tolist() for d in ("cosine", "l2", "ip")] == [
        [0, 0, 1],
        [1, 0, 1],
        [0, 0, 1],
    ]
    x = to_jax([[[[1.0, 1.2], [1, 0], [0, 1]]]])
    init = to_jax([[[[9.0, 0], [0, 1]]]])
    labels = [cluster("xla", x, init, 1, d)[1][0, 0, 0].item() for d in ("cosine", "ip")]
    assert labels == [1, 0]


def test_auto_is_xla_on_a_cpu():
    x = to_jax(np.random.default_rng(9).normal(size=(1, 1, 30, 8)), jnp.float32)
    work = functools.partial(
        kmeans, mask=to_jax(np.ones((1, 30), bool)), init=to_jax(np.asarray(x)[:, :, :3]), clusters=to_jax([3])
    )
    auto, xla = jax.device_get([work(x, iterations=3, implementation=name) for name in ("auto", "xla")])
    assert all((a == b).all() for a, b in zip(auto, xla, strict=True))


def test_refusals():
    given = np.zeros((1, 1, 4, 48), np.float32), np.ones((1, 4), bool), np.ones(1, np.int32)
    x, mask, one = map(to_jax, given)
    with pytest.raises(Unsupported, match="head dim 48 is not a power of two"):
        kmeans(x, mask, x, one, iterations=1, implementation="gpu", interpret=True)
    with pytest.raises(Unsupported, match="queries are float16"):
        kmeans(to_jax(x, jnp.float16), mask, x, one, iterations=1, implementation="tpu", interpret=True)
