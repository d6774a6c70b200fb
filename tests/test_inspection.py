"""Which positions a cache holds, against what each method says it keeps."""

import numpy as np
import pytest

from kvjax.models import Params
from kvjax.policies import Full, PolicyError, StreamingLLM, TreeKV
from kvjax.runtime.inspection import retained_positions

PROMPT = list(range(3, 43))
STEPS = 20
POSITIONS = np.arange(len(PROMPT) + STEPS - 1)
SEEN = len(PROMPT) + np.arange(STEPS)[:, None]
"""Tokens read at each step."""


def test_full_keeps_all_that_was_read(tiny: Params) -> None:
    held = retained_positions(tiny, PROMPT, Full(), STEPS)
    assert np.array_equal(held, POSITIONS < SEEN)


def test_streaming_keeps_sinks_and_the_latest(tiny: Params) -> None:
    held = retained_positions(tiny, PROMPT, StreamingLLM(budget=16, sinks=3), STEPS)
    assert np.array_equal(held, (POSITIONS < 3) | ((POSITIONS >= SEEN - 13) & (POSITIONS < SEEN)))


def test_heads_that_differ_count_as_shares(tiny: Params) -> None:
    held = retained_positions(tiny, PROMPT, TreeKV(budget=16, sinks=2, recent=4, block=2), STEPS)
    heads = tiny.config.num_layers * tiny.config.num_kv_heads
    assert np.array_equal(held * heads, np.round(held * heads))
    assert held.sum(axis=1) == pytest.approx(np.full(STEPS, 16))  # every head is full
    assert np.all(held[:, :2] == 1)
    assert np.all(held[(POSITIONS >= SEEN - 4) & (POSITIONS < SEEN)] == 1)
    assert np.all(held[POSITIONS >= SEEN] == 0)
    assert np.all(held[1:] <= held[:-1] + (SEEN[:-1] <= POSITIONS))  # what is gone stays gone
    assert np.any((held > 0) & (held < 1))


@pytest.mark.parametrize(
    ("prompt", "policy", "steps", "error", "says"),
    [
        ([], Full(), 4, ValueError, "non-empty list"),
        ([1], Full(), 0, ValueError, "max_new_tokens=0"),
        ("text", Full(), 4, ValueError, "no tokenizer"),
        ([1, 2] * 50, TreeKV(budget=0.02), 4, PolicyError, "budget of 0.02"),
    ],
)
def test_what_cannot_be_run(tiny: Params, prompt, policy, steps: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        retained_positions(tiny, prompt, policy, steps)
