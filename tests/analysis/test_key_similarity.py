"""Key similarity against its definition."""

import sys

import numpy as np
import pytest

from kvjax.analysis import key_similarity
from kvjax.analysis.recording import record

TEXT = np.random.default_rng(4).integers(0, 64, size=70).tolist()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_similarity_of_a_real_head(tiny):
    keys = record(tiny, TEXT)[1].k[:, 1]
    matrix = key_similarity.similarity(keys)
    expected = [[cosine(a, b) for b in keys] for a in keys]
    np.testing.assert_allclose(matrix, expected, atol=1e-5)
    np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-6)


def test_by_distance_averages_all_pairs(tiny):
    keys = record(tiny, TEXT)[0].k
    curves = key_similarity.by_distance(keys, distance=69)
    assert curves.shape == (2, 69)
    for head in range(2):
        for d in (1, 7, 68, 69):
            pairs = [cosine(keys[t, head], keys[t + d, head]) for t in range(70 - d)]
            assert curves[head, d - 1] == pytest.approx(np.mean(pairs), abs=1e-5)


def test_keys_that_turn_by_the_same_angle():
    """cos(d · 0.1) at distance d, for keys that turn by 0.1 per token; length does not matter."""
    angle = 0.1 * np.arange(50)
    keys = (np.stack([np.cos(angle), np.sin(angle)], axis=-1) * np.linspace(1, 9, 50)[:, None])[:, None]
    np.testing.assert_allclose(key_similarity.by_distance(keys, 20), np.cos(0.1 * np.arange(1, 21))[None], atol=1e-5)


@pytest.mark.parametrize("distance", [0, 70])
def test_a_distance_that_no_pair_has(distance):
    with pytest.raises(ValueError, match="give 1 to 69"):
        key_similarity.by_distance(np.ones((70, 1, 2)), distance)


def test_pictures_show_the_numbers(tiny, tmp_path):
    from matplotlib.image import imread

    keys = record(tiny, TEXT)[0].k
    maps = {f"head {head}": key_similarity.similarity(keys[:, head]) for head in range(2)}
    figure = key_similarity.draw_maps(maps)
    for panel, (title, matrix) in zip(figure.axes, maps.items(), strict=False):
        assert panel.get_title() == title
        np.testing.assert_array_equal(panel.images[0].get_array(), matrix)
    curve = key_similarity.by_distance(keys, 30)[0]
    lines = key_similarity.draw_by_distance({"first": curve, "half": curve / 2})
    panel = lines.axes[0]
    for line, expected in zip(panel.lines, (curve, curve / 2), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 31))
        np.testing.assert_array_equal(line.get_ydata(), expected)
    assert "tokens" in panel.get_xlabel()
    for name, picture in (("maps", figure), ("lines", lines)):
        picture.savefig(tmp_path / f"{name}.png")
        assert len(np.unique(imread(tmp_path / f"{name}.png").reshape(-1, 4), axis=0)) > 10


def test_nothing_to_draw(monkeypatch):
    with pytest.raises(ValueError, match="at least one"):
        key_similarity.draw_maps({})
    with pytest.raises(ValueError, match="at least one"):
        key_similarity.draw_by_distance({})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install"):
        key_similarity.draw_by_distance({"a": np.ones(3)})
