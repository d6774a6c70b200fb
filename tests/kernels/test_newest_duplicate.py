"""The newest near duplicate of each key, by every implementation, against loops in float64."""

import jax
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import newest_duplicate
from kvjax.pallas_kernels.kmeans import reference
from kvjax.pallas_kernels.op import Unsupported

SHAPES = [(2, 2, 50, 16, "float16"), (1, 2, 64, 16, "bfloat16"), (1, 1, 7, 32, "float16")]


def draw(batch, heads, count, dim, dtype):
    """Keys around a few directions, of which some are the same, one has length 0, and some are not there."""
    random = np.random.default_rng(count)
    directions = random.normal(size=(5, dim))
    keys = directions[random.integers(0, 5, (batch, heads, count))] + random.normal(size=(batch, heads, count, dim)) / 2
    keys[:, :, 3] = keys[:, :, 1]
    keys[:, :, 4] = 0
    live = random.random((batch, heads, count)) < 0.8
    live[:, :, :5] = True
    keys = np.where(live[..., None], keys, 0)
    return to_jax(keys, dtype), to_jax(live)


def expected(keys, live, threshold):
    """Each key beside all others, and how far the nearest cosine is from the threshold."""
    keys, live = np.asarray(keys, np.float64), np.asarray(live)
    newest, margin = np.full(live.shape, -1), np.inf
    for row, head in np.ndindex(live.shape[:2]):
        for i, key in enumerate(keys[row, head]):
            for j, other in enumerate(keys[row, head]):
                if i == j or not live[row, head, j] or not live[row, head, i]:
                    continue
                lengths = np.linalg.norm(key) * np.linalg.norm(other)
                cosine = key @ other / lengths if lengths else 0.0
                margin = min(margin, abs(cosine - threshold))
                if cosine > threshold:
                    newest[row, head, i] = max(newest[row, head, i], j)
    return newest, margin


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("threshold", [0.5, -0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_finds_the_newest_of_the_others(shape, threshold, implementation):
    """A key that is not there has none and is nobody's, also below 0, where a key of length 0 is everybody's duplicate."""
    keys, live = draw(*shape)
    wanted, margin = expected(keys, live, threshold)
    assert margin > 1e-5, "rounding would decide"
    assert (wanted[np.asarray(live)] >= 0).any()
    found = newest_duplicate(keys, live, threshold, implementation=implementation, interpret=implementation != "xla")
    np.testing.assert_array_equal(found, wanted)


def test_float32_is_left_to_xla():
    """Which multiplies it faster on GPUs."""
    keys, live = draw(1, 1, 32, 16, "float32")
    with pytest.raises(Unsupported, match="keys are float32"):
        newest_duplicate(keys, live, 0.5, implementation="gpu", interpret=True)
    np.testing.assert_array_equal(newest_duplicate(keys, live, 0.5), expected(keys, live, 0.5)[0])


def test_parts_do_not_matter(monkeypatch):
    """Some keys at a time, as many as do not divide their number, give what all at once do."""
    keys, live = draw(*SHAPES[0])

    def apart(*args):
        """By a program of its own, which does not know how many keys another took at a time."""
        return jax.jit(lambda *args: newest_duplicate(*args, 0.5, implementation="xla"))(*args)

    expected = apart(keys, live)
    monkeypatch.setattr(reference, "COSINES", 0)
    np.testing.assert_array_equal(apart(keys, live), expected)
