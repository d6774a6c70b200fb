"""Merging inside chunks against loops over tokens, whoever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import Clusters, copy_clusters, merge_clusters
from kvjax.pallas_kernels.cluster_merging import merge_clusters_pallas_triton as pallas_triton
from kvjax.pallas_kernels.op import Unsupported

HEADS, CHUNK, CHUNKS, DIM = 2, 32, 3, 32


@pytest.fixture(params=["xla", "gpu"])
def merge(request):
    """The public function with one implementation, interpreted where it is a Pallas kernel."""
    return merging(request.param)


@functools.cache
def merging(implementation):
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    return jax.jit(functools.partial(merge_clusters, **options), static_argnums=4)


def draw(seed, first, count, share, chunk=CHUNK, dtype="float32"):
    """Tokens, NaN after each row's last, and edges that a `share` of the even ones are merged along."""
    random = np.random.default_rng(seed)
    batch, places, half = len(count), CHUNKS * chunk + 1, -(-chunk // 2)
    first, count = np.asarray(first, np.int32), np.asarray(count, np.int32)
    there = (np.arange(places) < (first + count)[:, None])[:, None]
    there = np.broadcast_to(there, (batch, HEADS, places))
    k, v = (np.where(there[..., None], random.normal(size=(*there.shape, DIM)), np.nan) for _ in range(2))
    pos = np.where(there, np.argsort(random.random(there.shape), axis=-1), 10**6).astype(np.int32)
    weight = np.where(there, random.integers(1, 9, there.shape), np.nan).astype(np.float32)
    shape = batch, HEADS, -(-places // chunk), half
    target = random.integers(0, min(4, chunk // 2), size=shape)  # few, so that clusters are large
    at, count_of = np.arange(shape[2])[:, None] * chunk, count[:, None, None, None]
    exists = (at + 2 * np.arange(half) < count_of) & (at + 2 * target + 1 < count_of)
    target = np.where(exists & (random.random(shape) < share), target, -1)
    tokens = Clusters(to_jax(k, dtype), to_jax(v, dtype), to_jax(pos), to_jax(weight))
    return tokens, to_jax(target, jnp.int32), to_jax(first), to_jax(count), chunk


def expected(rows, pos, weight, target, chunk):
    """What is left of one head's tokens: rows in float64, positions and weights."""
    total = {i: weight[i].item() * np.asarray(row, np.float64) for i, row in enumerate(rows)}
    weights, newest = ({i: one.item() for i, one in enumerate(x)} for x in (weight, pos))
    for number, places in enumerate(target):
        for i, to in enumerate(places):
            if to >= 0:
                gone, stays = number * chunk + 2 * i, number * chunk + 2 * to + 1
                total[stays] = total[stays] + total.pop(gone)
                weights[stays] += weights.pop(gone)
                newest[stays] = max(newest[stays], newest.pop(gone))
    return np.stack([total[i] / weights[i] for i in total]), list(newest.values()), list(weights.values())


def check(out, inputs, error=1e-6):
    out, (tokens, target, first, count, chunk) = jax.device_get((out, inputs))
    for row, head in np.ndindex(tokens.pos.shape[:2]):
        before, end = int(first[row]), int(first[row] + count[row])
        k, v, pos, weight = (x[row, head] for x in tokens)
        got_k, got_v, got_pos, got_weight = (x[row, head] for x in out)
        for got, rows in ((got_k, k), (got_v, v)):
            left, newest, weights = expected(
                rows[before:end], pos[before:end], weight[before:end], target[row, head], chunk
            )
            assert got.dtype == rows.dtype
            np.testing.assert_array_equal(got[:before], rows[:before])
            np.testing.assert_allclose(got[before:][: len(left)].astype(np.float64), left, atol=error)
        assert got_pos[: before + len(left)].tolist() == pos[:before].tolist() + newest
        assert got_weight[: before + len(left)].tolist() == weight[:before].tolist() + weights


class TestMergeClusters:
    @pytest.mark.parametrize("share", [0.7, 1.0])
    def test_rows_of_different_sizes(self, merge, share):
        """Full chunks, one that ends within a pair, and ones with nothing but NaN in them."""
        inputs = draw(1, [0, 0], [CHUNKS * CHUNK, CHUNK + 7], share)
        check(merge(*inputs), inputs)

    def test_chunks_that_begin_later(self, merge):
        """After a few places, or more than are copied at a time."""
        inputs = draw(6, [3, 20], [CHUNKS * CHUNK - 3, CHUNK + 9], 0.7)
        check(merge(*inputs), inputs)

    def test_bfloat16(self, merge):
        """Means are rounded once, when they are written."""
        inputs = draw(7, [1], [2 * CHUNK + 5], 0.8, dtype="bfloat16")
        check(merge(*inputs), inputs, error=2**-7)

    def test_room_is_written_to_and_not_read(self, merge):
        inputs = draw(2, [0, 1], [2 * CHUNK, 5], 0.5)
        room = (np.full_like(x, fill) for x, fill in zip(inputs[0], (np.nan, np.nan, -7, np.nan), strict=True))
        check(merge(*inputs, into=Clusters(*map(to_jax, room))), inputs)

    @pytest.mark.parametrize("count", [[0, 3], [-5, 0]])
    def test_rows_without_chunks(self, merge, count):
        """Of a row shorter than what is never merged, no more than what is before the chunks; less is asked for by a negative count."""
        inputs = draw(10, [7, 20], count, 0.9)
        merged, (tokens, _, first, _, _) = jax.device_get((merge(*inputs), inputs))
        for new, old in zip(merged, tokens, strict=True):
            for row, held in enumerate(first + np.minimum(count, 0)):
                np.testing.assert_array_equal(new[row, :, :held], old[row, :, :held])

    def test_without_edges_nothing_changes(self, merge):
        """To the bit."""
        first, count = [2, 0], [CHUNKS * CHUNK - 1, 1]
        inputs = draw(3, first, count, 0.0)
        for new, old in zip(*jax.device_get((merge(*inputs), inputs[0])), strict=True):
            for row, held in enumerate(np.add(first, count)):
                np.testing.assert_array_equal(new[row, :, :held], old[row, :, :held])


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("most", [256, 300, 1_000_000])
def test_heavy_clusters(implementation, most):
    """Weights of more than 8 bits, and of more than 16, in bfloat16: the mean is exact before it is rounded."""
    tokens, *edges = draw(8, [0], [2 * CHUNK], 0.9, dtype="bfloat16")
    weight = np.random.default_rng(0).integers(1, most, tokens.weight.shape)
    tokens = tokens._replace(weight=to_jax(weight, jnp.float32))
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    check(merge_clusters(tokens, *edges, **options), (tokens, *edges), error=2**-7)
    wide = tokens._replace(k=to_jax(tokens.k, jnp.float32), v=to_jax(tokens.v, jnp.float32))
    exact = merge_clusters(wide, *edges, implementation="xla")
    rounded = merge_clusters(wide._replace(k=tokens.k), *edges, **options)
    left = 2 * CHUNK - (np.asarray(edges[0]) >= 0).sum(axis=(-2, -1)).max()
    off = np.asarray(rounded.k, np.float64) - np.asarray(np.asarray(exact.k, jnp.bfloat16), np.float64)
    assert (off[:, :, :left] != 0).mean() < 0.01  # ties that float32 breaks


@pytest.mark.parametrize(("implementation", "chunk"), [("gpu", 256), ("xla", 256), ("xla", 2400)])
def test_large_stars(implementation, chunk):
    """One cluster of more than a hundred tokens, or a thousand, itself of clusters: none is left out."""
    tokens, target, first, count, _ = draw(11, [2], [2 * chunk], 0.0, chunk=chunk)
    target = np.array(target)
    target[:, :, 0], target[:, 0, 1, ::2] = 3, 1
    target = to_jax(target)
    options = {"implementation": implementation, "interpret": implementation != "xla"}
    out = merge_clusters(tokens, target, first, count, chunk, **options)
    check(out, (tokens, target, first, count, chunk))
    assert np.nanmax(out.weight) > 64 + chunk // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies(dtype):
    """What is a row's, and nothing else of what is written to."""
    tokens, *_ = draw(9, [0, 0], [CHUNKS * CHUNK, CHUNK + 1], 0.0, dtype=dtype)
    into = Clusters(*(to_jax(np.full_like(x, 7)) for x in tokens))
    size = to_jax([70, 0], jnp.int32)
    out = jax.device_get(copy_clusters(tokens, size, into, implementation="gpu", interpret=True))
    unmoved = np.asarray(copy_clusters(tokens, size, into, implementation="xla").k)
    tokens = jax.device_get(tokens)
    for new, old in zip(out, tokens, strict=True):
        np.testing.assert_array_equal(new[0, :, :70], old[0, :, :70])
        assert (new[0, :, 70:] == 7).all()
        assert (new[1] == 7).all()
    np.testing.assert_array_equal(unmoved[0, :, :70], tokens.k[0, :, :70])


def test_several_programs_for_a_chunk():
    inputs = draw(4, [0, 5], [CHUNKS * CHUNK - 3, 40], 0.6)
    check(pallas_triton.merge_clusters(*inputs, interpret=True, sizes={"pairs": 4, "odd": 8, "warps": 4}), inputs)


def test_odd_chunks():
    inputs = draw(5, [0, 2], [13, 4], 0.6, chunk=5)
    check(merge_clusters(*inputs), inputs)


@pytest.mark.parametrize(
    ("dtype", "chunk", "dim", "reason"),
    [
        ("float64", 32, 32, "keys and values are float64"),
        ("float32", 32, 48, "head dim 48 is not a power of two of at least 16"),
        ("float32", 16, 32, "a chunk of 16 slots is not a power of two from 32 to 512"),
        ("float32", 48, 32, "a chunk of 48 slots is not a power of two"),
        ("float32", 1024, 32, "a chunk of 1024 slots is not a power of two"),
    ],
)
def test_refusals(dtype, chunk, dim, reason):
    shape, none = (1, 1, 2 * chunk), np.zeros(1, np.int32)
    with jax.enable_x64(dtype == "float64"):
        rows = to_jax(np.zeros((*shape, dim)), dtype)
        tokens = Clusters(rows, rows, to_jax(np.zeros(shape), jnp.int32), to_jax(np.zeros(shape), jnp.float32))
        edges, *ends = map(to_jax, (np.full((1, 1, 2, chunk // 2), -1, np.int32), none, none + np.int32(chunk)))
        with pytest.raises(Unsupported, match=reason):
            merge_clusters(tokens, edges, *ends, chunk, implementation="gpu", interpret=True)
