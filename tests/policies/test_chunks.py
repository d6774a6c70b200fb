"""`chunkkv` over scorers, against the literal algorithm of kvpress' presses."""

import dataclasses

import jax
import numpy as np
import pytest
from arrays import to_jax
from policies import oracle_blocks as blocks
from policies import oracle_chunks as oracle
from policies import oracle_scoring as scoring
from policies.driver import TINY, make_case, run
from policies.slots import after_prompt, kept

from kvjax.cache import TokenBlock
from kvjax.policies import (
    AdaKV,
    ChunkKV,
    Compactor,
    ExpectedAttention,
    Full,
    KeyDiff,
    PolicyError,
    PyramidKV,
    SnapKV,
    by_layer,
    chunkkv,
    get_policy,
    pyramid,
)
from kvjax.policies.budget import budget_tokens
from kvjax.policies.transforms.chunks import Chunks
from kvjax.policies.unbound import check_unbound

# Cases worked out by hand.

SPIKES = np.asarray([[9.0, 0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0]])
"""Four chunks of three: one whose score is one token's, two that are even, and one without."""


def test_a_spiky_chunk_keeps_its_best_token_by_hand():
    """Means 3, 2, 1, 0; entropies 0, 1, 1, 0, of which the lower middle ones are 1 and 0: none is below 0."""
    assert oracle.gated(SPIKES[0], 5, 3, 1) == [0, 1, 2, 3, 4]
    scores = SPIKES[0].copy()
    scores[9:] = 0.5  # now three chunks are even: the threshold is 1
    assert oracle.gated(scores, 5, 3, 1) == [0, 3, 4, 5, 6]
    assert oracle.whole(scores, 6, 3) == [0, 1, 2, 3, 4, 5]


def test_what_is_left_goes_to_the_best_of_the_others_by_hand():
    scores = np.asarray([8.0, 7, 0, 2, 2, 2, 1, 1, 1])
    assert oracle.gated(scores, 7, 3, 1) == [0, 3, 4, 5, 6, 7, 8]
    assert oracle.gated(scores, 8, 3, 1) == [0, 1, 3, 4, 5, 6, 7, 8]


def test_the_ends_score_one_more_than_all_others():
    np.testing.assert_allclose(oracle.raised(np.asarray([[1.0, 2, 3], [4, 5, 6]]), 1, 0), [14, 7, 9])


# Random cases against the oracle.

CONFIGURATIONS = {
    "expected attention": (ExpectedAttention(budget=14, sinks=2, future=8), {"chunk": 4}, 4, 2),
    "snapkv, a fraction": (SnapKV(budget=0.4, window=4, pool="avg", kernel=5), {"chunk": 7}, 4, 2),
    "keydiff, gated": (KeyDiff(budget=16), {"chunk": 5, "spiky": 2}, 4, 1),
    "snapkv, gated": (SnapKV(budget=17, window=3), {"chunk": 6, "spiky": 1}, 3, 3),
    "expected attention, gated, a fraction": (
        ExpectedAttention(budget=0.3, sinks=2, future=8),
        {"chunk": 4, "spiky": 3},
        4,
        2,
    ),
}
STEPS = 2
FAST = {"expected attention", "snapkv, gated"}
LITERAL = {"expected_attention": scoring.ExpectedAttention, "snapkv": scoring.SnapKV, "keydiff": scoring.KeyDiff}


def literal_scores(policy, case, row: int, budget: int) -> tuple[np.ndarray, scoring.Row]:
    """Scores [K, n] of a row's prompt by the scorer's oracle."""
    length = int(case.lengths[row])
    q, k, v = (x[row, : length + case.steps] for x in (case.q, case.k, case.v))
    literal = LITERAL[policy.info.name](q, k, v, length, budget)
    own = {
        name: getattr(policy, name) for name in ("window", "pool", "kernel", "sinks", "future") if hasattr(policy, name)
    }
    vars(literal).update(own)
    literal.prefill()
    heads = [literal.prompt_scores(head)[:length] for head in range(literal.heads)]
    if hasattr(policy, "window"):  # the policy takes the mean over the observing queries, and the oracle their sum
        heads = [head / min(policy.window, length) for head in heads]
    return np.asarray(heads, np.float64), literal


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CONFIGURATIONS])
def test_equals_the_literal_algorithm(name):
    """A ragged batch, prompts shorter and longer than the budget and than a chunk: kept tokens, and those after them."""
    scorer, options, heads, kv_heads = CONFIGURATIONS[name]
    policy = chunkkv(scorer, **options)
    lengths = np.random.default_rng(len(name)).integers(5, 64, size=52)
    lengths[:3] = 5, 6, 64
    case = make_case(9, lengths, STEPS, heads, kv_heads)
    held = [kept(policy, case, state) for state in run(policy, case, padding=np.nan)[2]]
    for row, length in enumerate(lengths.tolist()):
        budget = max(budget_tokens(scorer.budget, length + STEPS), scorer.least_slots)
        heads_scores, literal = literal_scores(scorer, case, row, budget)
        if length <= budget:
            want = [list(range(length))] * kv_heads
        elif policy.spiky is not None:
            scores = oracle.raised(heads_scores, literal.first, literal.last)
            want = [oracle.gated(scores, budget, policy.chunk, policy.spiky)] * kv_heads
        elif length < policy.chunk:
            want = [literal.survivors(scores) for scores in heads_scores]
        else:
            scores = oracle.raised(heads_scores, literal.first, literal.last)
            want = [oracle.whole(scores, budget, policy.chunk)] * kv_heads
        for (head, tokens), (i, states) in ((a, b) for a in enumerate(want) for b in enumerate(held)):
            assert states[row][head] == {*tokens, *range(length, length + i)}


def test_a_gated_prompt_fills_its_budget():
    policy = chunkkv(SnapKV(budget=24, window=4), chunk=10, spiky=4)
    case = make_case(3, np.random.default_rng(1).integers(25, 120, size=24), steps=1)
    assert {len(head) for row in kept(policy, case, after_prompt(policy, case)) for head in row} == {24}


def test_over_snapkv_it_is_chunkkv_by_kvpress_rule():
    """Pooling, means, one choice for all heads, and the window's scores: two implementations of one press."""
    case = make_case(5, np.random.default_rng(2).integers(20, 130, size=24), steps=1)
    ours = chunkkv(SnapKV(budget=40, window=8, pool="avg", kernel=5), chunk=12)
    own = ChunkKV(budget=40, window=8, chunk=12, pool=5, agg="mean", shared_heads=True, rule="kvpress")
    assert kept(ours, case, after_prompt(ours, case)) == kept(own, case, after_prompt(own, case))


# Chunked prefill.


class Gated(blocks.SnapKV):
    """Chunks of the text, gated, among what is kept and a block."""

    chunk, spiky = 4, 2

    def survivors(self, entries, probs):
        heads = np.asarray([self.scores(p) for p in probs])
        if len(entries[0]) <= self.budget:
            return entries
        scores = oracle.raised(heads, 0, self.last)
        return [oracle.gated(scores, self.budget, self.chunk, self.spiky, entries[0])] * self.heads


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 11])
def test_blocks_are_chosen_from_with_what_is_kept(size):
    """Chunks are those of the whole text, also those that a block's end divides."""
    policy = chunkkv(SnapKV(budget=15, window=3), chunk=4, spiky=2)
    prompt = np.random.default_rng(6).integers(0, 64, size=61)
    case = make_case(7, [len(prompt)] * 6, steps=1)
    held = in_blocks(policy, case, size)
    for row in range(6):
        text = Gated(*(x[row] for x in (case.q, case.k, case.v)), 62, size, budget=15, window=3)
        for start in range(0, 61, size):
            text.read(min(size, 61 - start))
        assert held[row] == text.kept()


def in_blocks(policy, case, size: int):
    """What is kept of prompts of equal length that are read in blocks."""
    length = int(case.lengths[0])
    spec = dataclasses.replace(case.spec, block=size)
    layer = policy.layer(spec)

    @jax.jit
    def read(state, q, k, v, start, count, total):
        block = TokenBlock(q, k, v, start, count, total, spec.rope)
        return layer.read_block(state, block, {})[1]

    state = jax.jit(layer.init)()
    for start in range(0, length, size):
        q, k, v = (np.zeros((x.shape[0], size, *x.shape[2:]), np.float32) for x in (case.q, case.k, case.v))
        count = min(size, length - start)
        for to, source in zip((q, k, v), (case.q, case.k, case.v), strict=True):
            to[:, :count] = source[:, start : start + count]
        rows = [np.full(len(case.lengths), n, np.int32) for n in (start, count, length + case.steps)]
        state = read(state, q, k, v, *map(to_jax, rows))
    return kept(policy, case, state)


def test_whole_chunks_need_whole_prompts():
    for policy in (chunkkv(SnapKV()), chunkkv(Compactor(), spiky=4), chunkkv(ExpectedAttention(), spiky=4)):
        with pytest.raises(PolicyError, match=r"chooses from the whole prompt"):
            check_unbound(policy, block=64)


# Composition, sizes and errors.


def test_memory_is_the_policys_and_a_chunk():
    inner = SnapKV(budget=1000)
    shape = TINY, 1, 30_000, 24
    assert chunkkv(inner, chunk=10, spiky=4).nbytes(*shape) == inner.nbytes(*shape)
    assert chunkkv(inner, chunk=100).nbytes(*shape) == SnapKV(budget=1100).nbytes(*shape)


def test_each_part_is_kept_in_chunks():
    bound = get_policy("chunkkv(pyramid(snapkv:budget=128,window=8; beta=4); chunk=10)").bind(TINY)
    assert all(type(policy) is Chunks for policy in bound.layers)
    assert bound == pyramid(chunkkv(SnapKV(budget=128, window=8), chunk=10), beta=4).bind(TINY)
    assert chunkkv(PyramidKV(budget=64)).bind(TINY).bind(TINY) == chunkkv(PyramidKV(budget=64))
    assert get_policy("chunkkv(by_layer(knorm; snapkv))").bind(TINY) == by_layer(
        [chunkkv(get_policy("knorm")), chunkkv(SnapKV())]
    )


@pytest.mark.parametrize("policy", [Full(), AdaKV(), ChunkKV()], ids=str)
def test_policies_that_keep_others_than_the_highest_are_refused(policy):
    with pytest.raises(PolicyError, match=r"chunkkv\(.*does not keep each head's highest scores"):
        chunkkv(policy).bind(TINY)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk": 0}, "chunk=0"),
        ({"spiky": 0}, "spiky=0"),
        ({"chunk": 4, "spiky": 4}, r"spiky=4 is not below chunk=4\. Lower spiky"),
    ],
)
def test_bad_hyperparameters(options, says):
    with pytest.raises(PolicyError, match=says):
        chunkkv(SnapKV(), **options)
