"""Top-k, by every implementation, against a sorted list."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax
from kernels.interpreter import races_found

from kvjax.pallas_kernels import top_k, top_k_indices
from kvjax.pallas_kernels.op import Unsupported


def chosen(row, count):
    """The best of one row as a mask: highest first, NaN last, of equal ones the first."""
    order = sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), -float(row[i])))  # a stable sort
    keep = np.zeros(len(row), bool)
    keep[order[: max(count, 0)]] = True
    return keep


def rows(seed, number, size, dtype):
    """Rows of normal scores, of many equal ones, of one value, of zeros of both signs, with infinities and NaN."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(number, size)).astype(np.float32)
    scores[1::6] = np.round(2 * scores[1::6])
    scores[2::6] = -3.25
    scores[3::6] *= 0
    scores[4::6, ::3] = -np.inf
    scores[4::6, 1::7] = np.inf
    scores[5::6, ::2] = np.nan
    scores[5::6, ::3] = -np.inf
    count = random.integers(-1, size + 2, number)
    count[::7] = size // 2
    return to_jax(scores, dtype), to_jax(count, jnp.int32)


@pytest.fixture(scope="module", params=["xla", "tpu", "gpu"])
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def compute(implementation):
    return jax.jit(lambda *args: top_k(*args, implementation=implementation, interpret=implementation != "xla"))


class TestTopK:
    @pytest.mark.parametrize(
        ("number", "size", "dtype"),
        [(9, 1, "float32"), (60, 37, "float32"), (120, 128, "float32"), (18, 300, "float32"), (30, 37, "bfloat16")],
    )
    def test_equals_a_stable_sort(self, compute, implementation, number, size, dtype):
        scores, count = rows(size, number, size, dtype)
        keep = np.asarray(compute(scores, count))
        expected = [chosen(row, n) for row, n in zip(np.asarray(scores, np.float32), count.tolist(), strict=True)]
        np.testing.assert_array_equal(keep, expected)
        assert implementation != "tpu" or not races_found()

    def test_counts_spread_over_heads(self, compute):
        """A number for each row of the batch serves all its heads, and NaN beyond a row's end is not chosen."""
        scores, _ = rows(7, 12, 37, "float32")
        scores = np.where(np.arange(37) < 20, np.nan_to_num(np.asarray(scores), nan=0.0), np.float32(np.nan))
        keep = np.asarray(compute(scores.reshape(3, 4, 37), to_jax([[0], [5], [20]])))
        assert keep.shape == (3, 4, 37)
        assert (keep.sum(axis=-1) == [[0], [5], [20]]).all()
        assert not keep[..., 20:].any()

    def test_equal_scores_are_taken_from_the_left(self, compute):
        keep = compute(to_jax([[1.0, 2.0, 2.0, 1.0, -0.0, 0.0, 2.0]]), to_jax([5]))
        assert np.flatnonzero(keep).tolist() == [0, 1, 2, 3, 6]

    def test_rounding_does_not_decide(self, compute):
        """Scores that differ by a few units in the last place are equal, whatever their size; in what is well apart all is as before."""
        equal = rounded(np.asarray([[3.0, 1, 2, 2, 1, 2, 3, 2, 1]] * 8) * 10.0 ** np.arange(-4, 4)[:, None])
        for count in range(10):
            keep = np.asarray(compute(to_jax(equal), np.full(8, count, np.int32)))
            assert [np.flatnonzero(row).tolist() for row in keep] == [sorted([0, 6, 2, 3, 5, 7, 1, 4, 8][:count])] * 8
        apart = np.linspace(1, 1.01, 37, dtype=np.float32)[None] * np.asarray([[1], [-1]], np.float32)
        keep = np.asarray(compute(to_jax(apart), to_jax([5, 5], jnp.int32)))
        assert [np.flatnonzero(row).tolist() for row in keep] == [[32, 33, 34, 35, 36], [0, 1, 2, 3, 4]]


def rounded(x):
    """Numbers with the rounding errors that sums in another order have."""
    return (x * (1 + 5e-7 * np.random.default_rng(0).standard_normal(x.shape))).astype(np.float32)


class TestIndices:
    @pytest.mark.parametrize("implementation", ["xla", "gpu"])
    @pytest.mark.parametrize(("number", "size", "room"), [(18, 37, 20), (12, 300, 64), (6, 128, 128)])
    def test_are_where_the_mask_is(self, implementation, number, size, room):
        """Those of the mask but for what is -inf or NaN, each once and first; the others are places in the row, too."""
        scores, count = rows(3, number, size, "float32")
        count = to_jax(np.minimum(count, room))
        index, live = jax.device_get(
            top_k_indices(scores, count, room, implementation=implementation, interpret=implementation == "gpu")
        )
        assert index.shape == live.shape == (number, room)
        assert ((index >= 0) & (index < size)).all()
        scores = np.asarray(scores)
        finite = np.where(np.isnan(scores), -np.inf, scores) > -np.inf
        expected = np.asarray(top_k(to_jax(scores), count)) & finite
        for places, meant, mask in zip(index, live, expected, strict=True):
            assert (np.diff(meant.astype(int)) <= 0).all()
            assert sorted(places[meant].tolist()) == np.flatnonzero(mask).tolist()

    @pytest.mark.parametrize("implementation", ["xla", "gpu"])
    def test_rounding_does_not_decide(self, implementation):
        options = {"implementation": implementation, "interpret": implementation == "gpu"}
        equal = to_jax(rounded(np.asarray([[3.0, 1, 2, 2, 1, 2, 3, 2, 1]] * 16)))
        for count in range(1, 10):
            index, live = jax.device_get(top_k_indices(equal, to_jax(np.full(16, count)), 9, **options))
            chosen = [sorted(row[meant].tolist()) for row, meant in zip(index, live, strict=True)]
            assert chosen == [sorted([0, 6, 2, 3, 5, 7, 1, 4, 8][:count])] * 16

    def test_of_rows_with_heads(self):
        """A number for each row of the batch serves all its heads."""
        scores = to_jax(np.arange(24.0).reshape(2, 3, 4), jnp.float32)
        index, live = jax.device_get(top_k_indices(scores, to_jax([[1], [0]]), 2))
        assert live.tolist() == [[[True, False]] * 3, [[False, False]] * 3]
        assert (index[0, :, 0] == 3).all()


@pytest.mark.parametrize(("implementation", "longest"), [("tpu", 131072), ("gpu", 65536)])
def test_rows_too_long_are_refused(implementation, longest):
    with pytest.raises(Unsupported, match=rf"rows of {longest + 1} scores do not fit .*; {longest} do"):
        top_k(
            to_jax(np.zeros((1, longest + 1)), jnp.float32), to_jax([1]), implementation=implementation, interpret=True
        )


def test_another_device_is_refused():
    with pytest.raises(Unsupported, match=r"this program is for cpu, not for a gpu"):
        top_k(to_jax(np.zeros((1, 4)), jnp.float32), to_jax([1]), implementation="gpu")


def test_nothing_to_choose_from():
    assert top_k(to_jax(np.zeros((3, 0)), jnp.float32), to_jax([1, 1, 1])).shape == (3, 0)
    assert top_k(to_jax(np.zeros((0, 5)), jnp.float32), to_jax(np.zeros(0), jnp.int32)).shape == (0, 5)
