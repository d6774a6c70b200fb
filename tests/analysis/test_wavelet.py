"""The Haar decomposition against a computation by hand, and of attention against its definition."""

import numpy as np
import pytest

from kvjax.analysis.recording import Recorded, record
from kvjax.analysis.wavelet import components, contributions, decompose, draw_magnitudes, magnitudes, reconstruct


def test_by_hand():
    """(4, 2, 5, 7): pairs differ by 2 and -2 about their means 3 and 6, and these by -3 about 4.5."""
    signal = np.asarray([4.0, 2.0, 5.0, 7.0])
    approximation, (first, second) = decompose(signal, 2)
    np.testing.assert_allclose(first, np.asarray([2, -2]) / np.sqrt(2))
    np.testing.assert_allclose(second, [-3])
    np.testing.assert_allclose(approximation, [9])
    np.testing.assert_allclose(components(signal, 2), [[1, -1, -1, 1], [-1.5, -1.5, 1.5, 1.5]])


def test_the_printed_filters():
    """A[n] = Σ s[k] g[2n - k] and D[n] = Σ s[k] h[2n - k], positions counted from 1 as in the paper."""
    g, h = {0: 2**0.5 / 2, 1: 2**0.5 / 2}, {0: -(2**0.5) / 2, 1: 2**0.5 / 2}
    signal = np.random.default_rng(0).normal(size=16)
    approximation, (detail,) = decompose(signal, 1)
    for filters, found in ((g, approximation), (h, detail)):
        want = [sum(signal[k - 1] * filters.get(2 * n - k, 0.0) for k in range(1, 17)) for n in range(1, 9)]
        np.testing.assert_allclose(found, want)


def test_parts_add_up():
    signal = np.random.default_rng(1).normal(size=(32, 3))
    parts = components(signal, 4)
    assert parts.shape == (4, 32, 3)
    means = np.repeat(signal.reshape(2, 16, 3).mean(axis=1), 16, axis=0)
    np.testing.assert_allclose(parts.sum(axis=0) + means, signal)
    approximation, details = decompose(signal, 4)
    for detail in reversed(details):
        approximation = reconstruct(approximation, detail)
    np.testing.assert_allclose(approximation, signal)


@pytest.mark.parametrize(("length", "levels"), [(12, 3), (8, 0)])
def test_lengths_that_do_not_halve(length, levels):
    with pytest.raises(ValueError, match="multiple of"):
        decompose(np.zeros(length), levels)


def test_contributions_are_attention_times_value():
    random = np.random.default_rng(2)
    q, k, v = (random.normal(size=(10, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    for window, first in ((None, 0), (6, 4)):
        found = contributions(Recorded(q, k, v, window))
        for n in range(4):
            weights = np.exp([q[-1, n] @ k[j, n // 2] / 2 if j >= first else -np.inf for j in range(10)])
            np.testing.assert_allclose(found[n], (weights / weights.sum())[:, None] * v[:, n // 2], rtol=1e-5)


def test_magnitudes_of_a_model_and_their_picture(tiny):
    layers = record(tiny, np.random.default_rng(3).integers(0, 64, size=64).tolist())
    found = magnitudes(layers, levels=3)
    want = np.mean(
        [np.abs(components(signal, 3)).mean(axis=-1) for layer in layers for signal in contributions(layer)], axis=0
    )
    np.testing.assert_allclose(found, want, rtol=1e-6)
    panel = draw_magnitudes(found, margin=10).axes[0]
    assert [str(line.get_label())[0] for line in panel.lines] == ["1", "2", "3"]
    for level, line in enumerate(panel.lines):
        np.testing.assert_array_equal(line.get_xdata(), range(10, 54))
        np.testing.assert_array_equal(line.get_ydata(), found[level, 10:54])
    with pytest.raises(ValueError, match="leave none to draw"):
        draw_magnitudes(found)


def test_a_signal_that_grows_towards_the_end():
    """What the paper sees on text, on a signal that has it: differences grow with the position."""
    signal = (np.linspace(0.1, 1, 64) * (-1.0) ** np.arange(64))[:, None]
    first = np.abs(components(signal, 2))[0, :, 0]
    assert (np.diff(first[0::2]) > 0).all()
