"""Methods combined, on the default model and real text."""

from pathlib import Path

import pytest

import kvjax
from kvjax.policies import CateKV, Chelsea, ChunkKV, DuoAttention, Quest, ShadowKV, pyramid, quantized

PROMPT = (Path(__file__).parents[2] / "docs" / "loomings.txt").read_text(encoding="utf-8").strip()
QUEST = Quest(budget=128, page=8, recent=32, dense_layers=0, gqa="sum")
SHADOW = ShadowKV(budget=128, outlier_chunks=8)

COMBINATIONS = {
    "CateKV × Quest": CateKV(budget=256, adaptive=QUEST),
    "CateKV × ShadowKV": CateKV(budget=256, adaptive=SHADOW),
    "DuoAttention × CateKV": DuoAttention(budget=256, sinks=16, retrieval=CateKV(budget=256)),
    "ChunkKV × KIVI, 4 bits": quantized(ChunkKV(budget=256), bits=4),
    "PyramidKV's budgets × ChunkKV": pyramid(ChunkKV(budget=256)),
    "Chelsea × its outlier heads on the host": Chelsea(budget=0.6, offload_outliers=True),
}

SLOW = {"CateKV × Quest", "ChunkKV × KIVI, 4 bits", "DuoAttention × CateKV"}
"""One that reads a part, one that drops and quantises, and one by heads. They are in different parts of the rotating
tests. The others compile as long, and are among the long tests.
"""

NEW = 12
"""As in the README's example, whose programs of the full cache serve here as well."""

OPTIONS = {"max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def full(smollm2):
    return kvjax.generate(smollm2, PROMPT, **OPTIONS)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long) for name in COMBINATIONS]
)
def test_text_goes_on_as_with_the_full_cache(name, smollm2, full):
    """The first words are the full cache's, from less memory, as much as was predicted."""
    got = kvjax.generate(smollm2, PROMPT, policy=COMBINATIONS[name], **OPTIONS)
    assert got.tokens[:4] == full.tokens[:4]
    held = COMBINATIONS[name].nbytes(smollm2.config, 1, got.stats.prompt_tokens, NEW, smollm2.dtype)
    assert got.stats.cache_bytes == held < full.stats.cache_bytes
    assert (got.stats.host_cache_bytes > 0) == ("host" in name)
