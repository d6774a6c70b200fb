"""Ada-KV against its definition, and its store of segments."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import oracle_scoring as oracle
from policies.driver import make_case, run
from policies.oracle_arrays import softmax
from policies.slots import kept, slots_of

from kvjax.pallas_kernels import ragged_attention
from kvjax.policies import AdaKV, PolicyError, SnapKV
from kvjax.policies.budget import budget_tokens

STEPS = 5


def shares(heads: list[np.ndarray], share: int, alpha: float) -> list[int]:
    """How many tokens each head keeps, given the scores of those that compete: K · share in all, but for rounding down."""
    places = [(-score, head, pos) for head, scores in enumerate(heads) for pos, score in enumerate(scores)]
    winners = [head for _, head, _ in sorted(places)[: share * len(heads)]]
    wanted = [winners.count(head) for head in range(len(heads))]
    return [int(np.floor(round((1 - alpha) * n + alpha * share, 6))) for n in wanted]


CASES = {
    "GQA": (AdaKV(budget=16, window=4), 4, 2),
    "MHA, no safeguard": (AdaKV(budget=11, window=3, alpha=0.0, pool="avg", kernel=3), 3, 3),
    "fraction, half": (AdaKV(budget=0.4, window=1, alpha=0.5, pool=None), 4, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    """A ragged batch with prompts shorter and longer than the budget."""
    policy, heads, kv_heads = CASES[name]
    lengths = np.random.default_rng(7).integers(3, 60, size=32)
    case = make_case(12, lengths, STEPS, heads, kv_heads)
    _, outputs, states = run(policy, case)
    held = kept(policy, case, states[0])
    uneven = 0
    for row, length in enumerate(lengths.tolist()):
        budget = budget_tokens(policy.budget, length + STEPS)
        literal = oracle.SnapKV(*(x[row, : length + STEPS] for x in (case.q, case.k, case.v)), length, budget)
        vars(literal).update(window=policy.window, pool=policy.pool, kernel=policy.kernel)
        literal.prefill()
        if length > budget:
            before = length - policy.window
            scores = [literal.prompt_scores(head)[:before] for head in range(kv_heads)]
            counts = shares(scores, budget - policy.window, policy.alpha)
            uneven += len(set(counts)) > 1
            for head, (values, count) in enumerate(zip(scores, counts, strict=True)):
                best = sorted(range(before), key=lambda pos, values=values: (-values[pos], pos))[:count]
                literal.held[head] = dict.fromkeys(sorted([*best, *range(before, length)]), 0.0)
        assert held[row] == literal.kept()
        assert sum(map(len, held[row])) <= kv_heads * budget
        for i in range(STEPS):
            np.testing.assert_allclose(outputs[i, row], literal.step(length + i), atol=2e-5)
    assert uneven > 8
    assert kept(policy, case, states[-1])[0][0] >= held[0][0]


def test_equal_shares_are_snapkv():
    case = make_case(3, [50, 7, 33], STEPS)
    options = {"budget": 16, "window": 4}
    np.testing.assert_allclose(run(AdaKV(alpha=1.0, **options), case)[1], run(SnapKV(**options), case)[1], atol=2e-6)


def test_a_head_gets_what_others_do_not_need():
    """By hand: two heads, three slots each beside the window; the first head's scores are all higher."""
    scores = np.asarray([[[9, 8, 7, 6, 5, 4, 0, 0], [3, 2, 1, 1, 1, 1, 0, 0]]], np.float32)
    lengths, budget = np.asarray([8], np.int32), np.asarray([5], np.int32)
    for alpha, counts in ((0.0, [6, 0]), (0.2, [5, 0]), (0.5, [4, 1]), (1.0, [3, 3])):
        keep = np.asarray(jax.jit(AdaKV(budget=5, window=2, alpha=alpha).keep_mask)(scores, lengths, budget))
        assert keep[0, :, :6].sum(axis=-1).tolist() == counts
        assert keep[0, :, 6:].all()


def test_memory_is_that_of_equal_heads(tiny):
    """Heads of any size share one store: it holds what SnapKV's would, not the longest head's times the number of heads."""
    sizes = [cls(budget=1000).nbytes(tiny.config, 3, 30_000, 24, jnp.float32) for cls in (AdaKV, SnapKV)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)
    state = jax.eval_shape(
        lambda: AdaKV(budget=1000).layer(dataclasses.replace(SPEC, prompt_len=30_000, new_tokens=24)).init()
    )
    assert state.k.shape == (1, 1, 2 * 1024, 8)


SPEC = make_case(0, [1], 1).spec


def test_attention_of_segments():
    """Random segments with gaps, empty ones among them, and slots that must not be seen; elsewhere the store is NaN."""
    random = np.random.default_rng(0)
    batch, kv_heads, group, dim, size = 32, 3, 2, 8, 40
    cuts = np.sort(random.integers(0, size + 1, size=(batch, 2 * kv_heads)), axis=-1)
    start, stop = cuts[:, ::2].astype(np.int32), cuts[:, 1::2].astype(np.int32)
    q, k, v = (random.normal(size=(batch, n, dim)).astype(np.float32) for n in (kv_heads * group, size, size))
    visible = random.random((batch, size)) < 0.8
    inside = ((np.arange(size) >= start[..., None]) & (np.arange(size) < stop[..., None])).any(axis=1) & visible
    k, v = (np.where(inside[..., None], x, np.nan) for x in (k, v))
    attend = jax.jit(partial(ragged_attention, scale=0.5))
    got = np.asarray(attend(q, *(x.astype(np.float32) for x in (k, v)), start, stop, visible=visible))
    for row, n in np.ndindex(batch, kv_heads * group):
        head = n // group
        slots = [s for s in range(start[row, head], stop[row, head]) if visible[row, s]]
        expected = softmax(k[row, slots] @ q[row, n] * 0.5) @ v[row, slots] if slots else np.zeros(dim)
        np.testing.assert_allclose(got[row, n], expected, atol=2e-6)


def test_tokens_seen_are_counted():
    """Those that were dropped too, of a prompt and while decoding."""
    case = make_case(3, [30, 2], 3)
    policy = AdaKV(budget=8, window=4)
    for step, state in enumerate(run(policy, case)[2]):
        assert slots_of(policy, case, state).seen.tolist() == [30 + step, 2 + step]


def test_without_a_prompt_heads_have_room_for_new_tokens():
    spec = dataclasses.replace(SPEC, prompt_len=0, new_tokens=40)
    state = jax.jit(AdaKV(budget=64).layer(spec).init)()
    assert state.start.tolist() == state.next.tolist() == [[0, 40]]
    assert state.k.shape[2] >= 80


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_bad_safeguard(alpha):
    with pytest.raises(PolicyError, match=f"alpha={alpha}"):
        AdaKV(alpha=alpha)


@pytest.mark.parametrize("budget", [8, 120])
def test_what_is_looked_at_has_no_more_slots_than_a_head_can_fill(budget):
    """A head has at most the tokens of a row, and at most the store."""
    layer = AdaKV(budget=budget, window=4).layer(make_case(0, [60], STEPS, 4, 2).spec)
    slots = jax.eval_shape(layer.view, jax.eval_shape(layer.init)).pos.shape
    assert slots == (1, 2, min(layer.spec.max_tokens, layer.capacity))
    assert (layer.capacity < layer.spec.max_tokens) == (budget == 8)
