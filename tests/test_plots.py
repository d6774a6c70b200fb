"""The picture of kept tokens shows exactly what the states hold."""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import plots
from kvjax.models import Params
from kvjax.policies import Full, HeadProfile, StreamingLLM
from kvjax.runtime.inspection import retained_positions

# As in test_inspection.py, so that the programs are compiled once for both.
PROMPT = list(range(3, 43))
STEPS = 20
STREAMING = StreamingLLM(budget=16, sinks=3)


def test_one_panel_a_policy_with_its_shares(tiny: Params) -> None:
    policies = [Full(), STREAMING]
    figure = plots.kept_tokens(tiny, PROMPT, policies, STEPS)
    panels, scale = figure.axes[:-1], figure.axes[-1]
    assert [panel.get_title() for panel in panels] == ["full", "streaming_llm, budget 16"]
    for panel, policy in zip(panels, policies, strict=True):
        shares = retained_positions(tiny, PROMPT, policy, STEPS)
        drawn = np.ma.filled(panel.images[0].get_array(), np.nan)
        written = np.arange(shares.shape[1]) < len(PROMPT) + np.arange(STEPS)[:, None]
        assert np.array_equal(drawn[written], shares[written])
        assert np.isnan(drawn[~written]).all()
        assert "tokens" in panel.get_xlabel()
    assert "tokens" in panels[0].get_ylabel()
    assert "share" in scale.get_ylabel()


def test_titles_of_ones_own(tiny: Params) -> None:
    figure = plots.kept_tokens(tiny, PROMPT, {"mine": STREAMING}, STEPS)
    assert figure.axes[0].get_title() == "mine"


def test_no_policy() -> None:
    with pytest.raises(ValueError, match="no policy to draw"):
        plots.draw({})


def test_without_matplotlib(tiny: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"a picture needs matplotlib: pip install 'matplotlib>="):
        plots.kept_tokens(tiny, PROMPT, [Full()], STEPS)


def test_the_picture_is_really_drawn(tiny: Params, tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = tmp_path / "kept.png"
    plots.kept_tokens(tiny, PROMPT, [Full(), STREAMING], STEPS).savefig(file)
    pixels = imread(file)[..., :3]
    assert pixels.shape[0] > 200
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


def test_map_of_heads() -> None:
    scores = ((1.5, 0.5, 2.0), (0.25, 3.0, 1.0))
    labels = (("consistent", "adaptive", "consistent"), ("adaptive", "consistent", "consistent"))
    figure = plots.head_map(HeadProfile("catekv", "a model", "nothing", (), scores, labels))
    panel, scale = figure.axes
    assert np.array_equal(panel.images[0].get_array(), scores)
    assert panel.collections[0].get_offsets().tolist() == [[1, 0], [0, 1]]  # head, layer
    assert panel.get_title() == "catekv: 2 of 6 heads adaptive (dots)"
    assert (panel.get_xlabel(), panel.get_ylabel(), scale.get_ylabel()) == ("KV head", "layer", "score")


def test_map_of_heads_that_are_all_alike() -> None:
    figure = plots.head_map(HeadProfile("chelsea", "a model", "nothing", (), ((1.0,),), (("clustered",),)))
    assert not figure.axes[0].collections


def test_costs_are_those_of_the_runs(tiny: Params) -> None:
    options = {"max_new_tokens": STEPS, "ignore_eos": True}
    stats = {p.info.name: kvjax.generate(tiny, PROMPT, policy=p, **options).stats for p in (Full(), STREAMING)}
    figure = plots.costs(stats)
    memory, speed = ([bar.get_width() for bar in panel.patches] for panel in figure.axes)
    assert memory == [run.cache_bytes / 1e6 for run in stats.values()]
    assert speed == [run.decode_tokens_per_second for run in stats.values()]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(stats)
    assert "MB" in figure.axes[0].get_xlabel()
    with pytest.raises(ValueError, match="no runs"):
        plots.costs({})


def test_a_passage_is_coloured_token_by_token() -> None:
    from matplotlib import colormaps

    pieces, shares = ["Call", " me", "\n", " Ishmael", "."], np.asarray([1.0, 0.0, 0.25, 0.5, 0.0])
    figure = plots.coloured_text(pieces, {"some": shares, "all": np.ones(5)}, width=12)
    some, whole, scale = figure.axes
    assert [panel.get_title(loc="left") for panel in (some, whole)] == ["some", "all"]
    assert "".join(text.get_text() for text in some.texts) == "Call me Ishmael."
    assert {text.get_position()[1] for text in some.texts} == {0.5, 1.5}  # two lines
    grounds = [bar.get_facecolor()[0] for bar in some.collections]
    colours = colormaps["viridis_r"]
    for ground, share in zip(grounds, shares, strict=True):
        assert np.allclose(ground, colours(share) if share else 1.0)
    assert "share" in scale.get_ylabel()


def test_a_passage_that_does_not_match() -> None:
    with pytest.raises(ValueError, match="3 shares for 2 tokens"):
        plots.coloured_text(["a", "b"], {"x": np.ones(3)})
    with pytest.raises(ValueError, match="no shares"):
        plots.coloured_text(["a"], {})


def compared(policies: list[str], targets: list[float], tasks: tuple[str, ...] = ("vt",)) -> list[dict[str, object]]:
    """Rows of a comparison in which all policies of a budget hold nearly the same bytes and score nearly the same."""
    rows = []
    for task in tasks:
        for i, policy in enumerate(policies):
            for target in [None] if policy in ("fp8", "full", "kivi", "turboquant") else targets:
                rows.append(
                    {
                        "task": task,
                        "policy": policy,
                        "target": target,
                        "metric": "score",
                        "higher_is_better": True,
                        "value": 0.9 if policy == "full" else 0.5 + 0.001 * i,
                        "cache_bytes": 4e8 * (target or 1.0) - i,
                        "full_cache_bytes": 4e8,
                        "tokens_per_second": None if task == "fidelity" else 30.0 + i,
                    }
                )
    return rows


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Pairs of a figure's texts that lie on one another, or beyond the figure's edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for panel in figure.axes:
        texts += [panel.title, panel._left_title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [
                tick.label1
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high and tick.label1.get_visible()
            ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    beyond = [
        (text, "edge")
        for text, box in boxes
        if not figure.bbox.contains(*box.min) or not figure.bbox.contains(*box.max)
    ]
    return beyond + [
        (a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.padded(-1).overlaps(y.padded(-1))
    ]


POLICIES = list(kvjax.policies.policies())


def test_a_comparison_at_one_budget_lists_policies() -> None:
    """All hold the same bytes, so over memory their markers would lie on one another."""
    rows = compared(["full", *(name for name in POLICIES if name != "full")], [0.25], ("vt", "fidelity"))
    figure = plots.tradeoff(rows)
    assert overlaps(figure) == []
    quality, speed, _, untimed = figure.axes
    markers = [line for line in quality.lines if line.get_marker() == "o"]
    assert len(markers) == len(POLICIES)
    assert {len(line.get_xdata()) for line in markers} == {1}
    labels = [label.get_text() for label in quality.get_yticklabels()]
    assert labels[0] == "full (100 %)"
    assert sorted(label.split(" ")[0] for label in labels) == POLICIES
    places = [markers[i].get_window_extent().y0 for i in range(len(markers))]
    assert min(abs(a - b) for a, b in itertools.pairwise(places)) > 10  # pixels: no marker covers another
    for panel, value in ((quality, 0.9), (speed, 30.0)):
        (reference,) = [line for line in panel.lines if line.get_linestyle() == "--"]
        assert set(reference.get_xdata()) == {value}
    assert "not measured" in [text.get_text() for text in untimed.texts]


def test_a_comparison_over_budgets_has_lines_and_the_full_cache_as_reference() -> None:
    rows = compared(["full", *(name for name in POLICIES if name != "full")], [0.125, 0.25])
    figure = plots.tradeoff(rows)
    assert overlaps(figure) == []
    memory = figure.axes[0]
    named = {line.get_label(): line for line in memory.lines if not line.get_label().startswith("_")}
    assert next(iter(named)) == "full"
    assert set(named) == set(POLICIES)
    for name, line in named.items():
        single = name in ("fp8", "full", "kivi", "turboquant")
        assert (len(line.get_xdata()), line.get_linestyle()) == ((1, "None") if single else (2, "-"))
    best = sorted((n for n in named if n != "full"), key=lambda n: -max(r["value"] for r in rows if r["policy"] == n))
    coloured = {name: line.get_color() for name, line in named.items() if line.get_color() != "0.75"}
    assert set(coloured) == {"full", *best[:5]}
    assert {text.get_text(): text.get_color() for text in memory.texts} == coloured
    assert len(set(coloured.values())) == 6
    (reference,) = [line for line in memory.lines if line.get_linestyle() == "--"]
    assert set(reference.get_ydata()) == {0.9}


def test_scores_that_are_none_are_left_out_of_a_comparison() -> None:
    rows = compared(["full", "treekv"], [0.25])
    rows[1]["value"] = None
    assert [label.get_text() for label in plots.tradeoff(rows).axes[0].get_yticklabels()][1] == "treekv (25 %)"
    rows = compared(["full", "treekv"], [0.25, 0.5])
    rows[1]["value"] = None
    assert len(plots.tradeoff(rows).axes[0].lines[-1].get_xdata()) == 1


@pytest.mark.parametrize("noise", [0.0, 1e-9])
@pytest.mark.parametrize("value", [12.3456789, 0.0])
@pytest.mark.parametrize("targets", [[0.25], [0.25, 0.5]], ids=["listed", "lines"])
def test_values_that_are_all_equal_have_an_axis_that_can_be_read(
    targets: list[float], value: float, noise: float
) -> None:
    """Ticks show values, no two alike, and not 0.2, 0.4 … with `1e-9+1.23456789e1` beside the axis."""
    rows = compared(["full", "treekv", "snapkv"], targets)
    for i, row in enumerate(rows):
        row["value"] = value + i * noise
    figure = plots.tradeoff(rows)
    assert overlaps(figure) == []
    panel = figure.axes[0]
    axis = panel.xaxis if len(targets) == 1 else panel.yaxis
    assert axis.get_offset_text().get_text() == ""
    low, high = axis.get_view_interval()
    shown = [
        float(tick.label1.get_text().replace("−", "-"))
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high
    ]
    assert len(set(shown)) == len(shown) >= 3
    assert min(shown) < value < max(shown)
    assert max(abs(each - value) for each in shown) <= max(0.1 * value, 2)
