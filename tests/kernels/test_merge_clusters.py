"""Merging inside chunks against loops over tokens, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import merge_clusters
from kvjax.pallas_kernels.dispatch import Unsupported
from kvjax.pallas_kernels.merge_clusters import gpu

HEADS, CHUNK, CHUNKS, WIDTH = 2, 32, 3, 32


@pytest.fixture(params=["xla", "gpu"])
def merge(request):
    """The public function with one implementation, interpreted where it is a Pallas body."""
    options = {"implementation": request.param, "interpret": request.param != "xla"}
    return jax.jit(functools.partial(merge_clusters, **options))


def draw(seed, count, share, chunk=CHUNK):
    """Tokens, NaN beyond each row's `count`, and edges that a `share` of the even ones are merged along."""
    random = np.random.default_rng(seed)
    batch, places, half = len(count), CHUNKS * chunk, -(-chunk // 2)
    live = np.broadcast_to((np.arange(places) < np.asarray(count)[:, None])[:, None], (batch, HEADS, places))
    kv = np.where(live[..., None], random.normal(size=(*live.shape, WIDTH)), np.nan).astype(np.float32)
    pos = np.where(live, np.argsort(random.random(live.shape), axis=-1), 10**6).astype(np.int32)
    weight = np.where(live, random.integers(1, 9, live.shape), np.nan).astype(np.float32)
    target = random.integers(
        0, min(4, chunk // 2), size=(batch, HEADS, CHUNKS, half)
    )  # few, so that clusters are large
    at = np.arange(CHUNKS)[:, None] * chunk
    exists = (at + 2 * np.arange(half) < np.asarray(count)[:, None, None])[:, None]
    exists = exists & (at + 2 * target + 1 < np.asarray(count)[:, None, None, None])
    target = np.where(exists & (random.random(target.shape) < share), target, -1)
    return [jnp.asarray(x) for x in (kv, pos, weight, target.astype(np.int32), np.asarray(count, np.int32))]


def expected(kv, pos, weight, target, count):
    """What is left of one row and head: rows in float64, positions and weights."""
    chunk = kv.shape[0] // target.shape[0]
    total = {i: np.asarray(weight[i] * np.asarray(kv[i], np.float64)) for i in range(count)}
    weights, newest = ({i: x[i].item() for i in range(count)} for x in (weight, pos))
    for number, places in enumerate(target):
        for i, to in enumerate(places):
            if to >= 0:
                gone, stays = number * chunk + 2 * i, number * chunk + 2 * to + 1
                total[stays] = total[stays] + total.pop(gone)
                weights[stays] += weights.pop(gone)
                newest[stays] = max(newest[stays], newest.pop(gone))
    return np.stack([total[i] / weights[i] for i in total]), list(newest.values()), list(weights.values())


def check(out, inputs):
    kv, pos, weight, target, count = (np.asarray(x) for x in inputs)
    got_kv, got_pos, got_weight = (np.asarray(x) for x in out)
    for row, head in np.ndindex(pos.shape[:2]):
        at = row, head
        rows, newest, weights = expected(kv[at], pos[at], weight[at], target[at], count[row])
        np.testing.assert_allclose(got_kv[at][: len(rows)], rows, atol=1e-6)
        assert got_pos[at][: len(rows)].tolist() == newest
        assert got_weight[at][: len(rows)].tolist() == weights


class TestMergeClusters:
    @pytest.mark.parametrize("share", [0.7, 1.0])
    def test_rows_of_different_sizes(self, merge, share):
        """Full chunks, one that ends within a pair, and ones with nothing but NaN in them."""
        inputs = draw(1, [CHUNKS * CHUNK, CHUNK + 7], share)
        check(merge(*inputs), inputs)

    def test_room_is_written_to_and_not_read(self, merge):
        inputs = draw(2, [2 * CHUNK, 5], 0.5)
        kv, pos, weight, *_ = inputs
        room = jnp.full_like(kv, jnp.nan), jnp.full_like(pos, -7), jnp.full_like(weight, jnp.nan)
        check(merge(*inputs, into=room), inputs)

    def test_without_edges_nothing_changes(self, merge):
        """To the bit."""
        count = [CHUNKS * CHUNK - 1, 1]
        inputs = draw(3, count, 0.0)
        for new, old in zip(merge(*inputs), inputs[:3], strict=True):
            for row, held in enumerate(count):
                np.testing.assert_array_equal(new[row, :, :held], old[row, :, :held])


def test_several_blocks_of_channels():
    inputs = draw(4, [CHUNKS * CHUNK - 3, 40], 0.6)
    check(gpu.merge_clusters(*inputs, interpret=True, sizes={"channels": 16, "warps": 4}), inputs)


def test_odd_chunks():
    inputs = draw(5, [13, 4], 0.6, chunk=5)
    check(merge_clusters(*inputs), inputs)


@pytest.mark.parametrize(
    ("dtype", "chunk", "width", "reason"),
    [
        ("bfloat16", 32, 32, "keys and values are bfloat16"),
        ("float32", 32, 48, "48 channels are not a power of two from 16 on"),
        ("float32", 16, 32, "a chunk of 16 places is not a power of two from 32 to 512"),
        ("float32", 48, 32, "a chunk of 48 places is not a power of two"),
        ("float32", 1024, 32, "a chunk of 1024 places is not a power of two"),
    ],
)
def test_refusals(dtype, chunk, width, reason):
    shape = 1, 1, 2 * chunk
    arrays = jnp.zeros((*shape, width), dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
    edges = jnp.full((1, 1, 2, chunk // 2), -1, jnp.int32)
    with pytest.raises(Unsupported, match=reason):
        merge_clusters(*arrays, edges, jnp.asarray([chunk]), implementation="gpu", interpret=True)
