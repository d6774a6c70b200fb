"""Attention weights of chosen layers, against transformers and the definition."""

import sys
from typing import Any

import numpy as np
import pytest
from oracles import converted, transformers_model

from kvjax.analysis.attention import attention_weights, draw_attention
from kvjax.analysis.recording import record
from kvjax.models import Params

TEXT = np.random.default_rng(4).integers(0, 48, size=40).tolist()


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", ["gemma-3", "gpt-oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral"))]
)
def test_weights_are_those_of_transformers(name: str) -> None:
    """With both full attention and sliding windows, another scale and norms; with sinks; with full attention; and with windows."""
    import torch

    model: Any = transformers_model(name)
    with torch.no_grad():
        want = model(torch.tensor([TEXT]), output_attentions=True).attentions
    found = attention_weights(converted(model), TEXT, layers=range(len(want)))
    assert list(found) == list(range(len(want)))
    for layer, weights in found.items():
        np.testing.assert_allclose(weights, want[layer][0], atol=2e-5)


def test_weights_follow_from_queries_and_keys(tiny: Params) -> None:
    found = attention_weights(tiny, TEXT, layers=[-1], last=3)
    assert list(found) == [1]
    q, k, _, _ = record(tiny, TEXT)[1]
    for n in range(4):
        for row, position in enumerate((37, 38, 39)):
            exponents = np.exp(k[: position + 1, n // 2] @ q[position, n] / 4)
            np.testing.assert_allclose(found[1][n, row, : position + 1], exponents / exponents.sum(), rtol=1e-4)
            assert not found[1][n, row, position + 1 :].any()


@pytest.mark.parametrize(
    ("tokens", "layers", "last", "says"),
    [
        ([], [0], None, "last=None: the text has 0 tokens"),
        (TEXT, [2], None, "the model has no layer 2 with attention. Use -2 to 1"),
        (TEXT, [0], 41, "last=41: the text has 40 tokens. Use 1 to 40"),
        (TEXT, [0], 0, "last=0: the text has 40 tokens"),
    ],
)
def test_other_arguments_are_refused(tiny: Params, tokens, layers, last, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attention_weights(tiny, tokens, layers, last)


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_attention({"first": np.eye(4), "last queries": np.full((2, 4), 0.25)})
    first, last, bar = figure.axes
    assert (first.get_title(), last.get_title()) == ("first", "last queries")
    np.testing.assert_allclose(first.images[0].get_array(), 4 * np.eye(4) - 4)
    np.testing.assert_allclose(last.images[0].get_extent(), (-0.5, 3.5, 3.5, 1.5))
    assert bar.get_ylabel() == "log10 of attention weight"
    with pytest.raises(ValueError, match="no attention weights to draw"):
        draw_attention({})


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib"):
        draw_attention({"a": np.eye(2)})
