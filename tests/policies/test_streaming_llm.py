"""StreamingLLM against its definition."""

import numpy as np
import pytest
from policies.driver import kept, make_case, rotate, run
from policies.oracle_arrays import ROPE, softmax

from kvjax.policies import PolicyError, StreamingLLM


def test_sinks_and_window():
    """20 tokens, 4 sinks and a window of 8: tokens 0-3 and 12-19 stay."""
    policy = StreamingLLM(budget=12)
    for prompt in (20, 13, 5, 1):
        case = make_case(0, [prompt], steps=20 - prompt)
        state, _, _ = run(policy, case)
        assert kept(policy, case, state) == [[{0, 1, 2, 3, *range(12, 20)}] * 2]


@pytest.mark.parametrize(("budget", "sinks", "heads", "kv_heads"), [(12, 4, 4, 2), (7, 0, 2, 2), (30, 5, 3, 1)])
def test_equals_the_definition(budget, sinks, heads, kv_heads):
    """Attend to sinks, window and the current token at positions 0, 1, 2, … of the cache, then drop the oldest of the window."""
    policy = StreamingLLM(budget=budget, sinks=sinks)
    lengths = np.random.default_rng(1).integers(1, 50, size=32)
    case = make_case(4, lengths, steps=16, heads=heads, kv_heads=kv_heads)
    _, outputs, states = run(policy, case)
    for row, length in enumerate(lengths):
        for i in range(case.steps):
            pos = length + i
            before = [p for p in range(pos) if p < sinks or p >= pos - (budget - sinks)]
            held = [*before, pos]
            for n in range(heads):
                head = n // (heads // kv_heads)
                keys = np.stack([rotate(ROPE, case.k[row, p, head], place) for place, p in enumerate(held)])
                query = rotate(ROPE, case.q[row, pos, n], len(held) - 1)
                out = softmax(keys @ query / np.sqrt(len(query))) @ case.v[row, held, head]
                np.testing.assert_allclose(outputs[i, row, n], out, atol=2e-5)
        after = {p for p in range(pos + 1) if p < sinks or p > pos - (budget - sinks)}
        assert kept(policy, case, states[-1])[row] == [after] * kv_heads


def test_budget_must_leave_a_recent_token():
    with pytest.raises(PolicyError, match="need 5"):
        StreamingLLM(budget=4)
    with pytest.raises(PolicyError, match="sinks=-1"):
        StreamingLLM(sinks=-1)
