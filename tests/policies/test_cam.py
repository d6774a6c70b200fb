"""CaM against its definition."""

import jax
import numpy as np
import pytest
from policies.driver import make_case, run
from policies.oracle_cam import CaM as Literal
from policies.slots import kept

from kvjax.policies import CaM, PolicyError, StreamingLLM
from kvjax.policies.families.noise import uniform

STEPS = 12


@pytest.mark.parametrize(
    ("options", "heads", "kv_heads"),
    [({"budget": 14, "merge": 4}, 4, 2), ({"budget": 9, "sinks": 1, "merge": 16, "seed": 5}, 2, 2)],
    ids=["GQA", "MHA, more to merge into than there are"],
)
def test_equals_the_definition(options, heads, kv_heads):
    """A ragged batch: what is kept, what is put out at every step, and the values merged at the end."""
    policy = CaM(**options)
    lengths = np.random.default_rng(1).integers(1, 40, size=64)
    case = make_case(4, lengths, STEPS, heads, kv_heads)
    drawn = np.asarray(jax.jit(lambda pos: uniform(case.spec, policy.seed, pos))(np.arange(60, dtype=np.int32)))
    state, outputs, states = run(policy, case)
    before, after = kept(policy, case, states[0]), kept(policy, case, state)
    slots, merges = jax.device_get(state.cache), 0
    for row, length in enumerate(lengths.tolist()):
        size = length + STEPS
        literal = Literal(case.q[row, :size], case.k[row, :size], case.v[row, :size], length, policy.budget)
        vars(literal).update(sinks=policy.sinks, merge=policy.merge, drawn=drawn)
        assert before[row] == literal.prefill()
        for i in range(STEPS):
            np.testing.assert_allclose(outputs[i, row], literal.step(length + i), atol=5e-5)
            literal.evict()
        assert after[row] == literal.kept()
        merges += literal.merges
        for head, slot in zip(*np.nonzero(slots.weight[row]), strict=True):
            pos = slots.pos[row, head, slot]
            np.testing.assert_allclose(slots.v[row, head, slot], literal.v[pos, head], atol=1e-5)
    assert 0.2 < merges / (len(lengths) * kv_heads * STEPS) < 0.95  # some are, some are not


def test_a_value_is_divided_among_those_that_follow():
    """By hand: a value of 8 that leaves, merged into the next 4 tokens, adds 2 to each, and nothing to the others."""
    policy = CaM(budget=8, sinks=2, merge=4)
    case = make_case(0, [8], steps=1, heads=1, kv_heads=1)
    case.q[:] = 0  # all attend evenly, so that the oldest token has got most, and is merged for certain
    case.v[:] = 0
    case.v[0, 2] = 8
    state, _, _ = run(policy, case)
    values = dict(zip(np.asarray(state.cache.pos)[0, 0].tolist(), np.asarray(state.cache.v)[0, 0, :, 0], strict=True))
    assert {pos: value for pos, value in values.items() if pos >= 0} == dict.fromkeys((0, 1, 7, 8), 0) | dict.fromkeys(
        (3, 4, 5, 6), 2
    )


def test_keeps_what_streaming_llm_keeps():
    case = make_case(2, [30, 5, 12], STEPS)
    states = [run(cls(budget=10), case)[0] for cls in (CaM, StreamingLLM)]
    assert kept(CaM(), case, states[0]) == kept(StreamingLLM(), case, states[1])
    np.testing.assert_array_equal(states[0].cache.k, states[1].cache.k)


def test_published_window():
    assert CaM().merge == 16
    with pytest.raises(PolicyError, match="merge=0"):
        CaM(merge=0)
