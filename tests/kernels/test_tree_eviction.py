"""An eviction of TreeKV, by every implementation, against lists."""

import jax.numpy as jnp
import numpy as np
import pytest
from arrays import to_jax

from kvjax.pallas_kernels import Ranked, tree_eviction

ROWS, HEADS, SINKS = 2, 3, 2
TREE, BUDGET = (5, 4), (11, 9)
"""Of each row."""


def draw(slots, counts):
    """A cache whose ranks are in any order among its slots, with scores of which some are equal."""
    random = np.random.default_rng(slots)
    rank = np.full((ROWS, HEADS, slots), slots, np.int32)
    for row, head in np.ndindex(ROWS, HEADS):
        places = random.permutation(slots)[: counts[row]]
        rank[row, head, places] = random.permutation(counts[row])
    live = rank < slots
    pos = np.where(live, 100 + rank, -1).astype(np.int32)
    score, steps = (np.where(live, random.integers(1, 4, rank.shape), 0).astype(np.float32) for _ in range(2))
    count = np.repeat(np.asarray(counts, np.int32)[:, None], HEADS, axis=1)
    scope = random.integers(0, 4, (ROWS, HEADS)).astype(np.int32)
    state = Ranked(rank, pos, live.astype(np.float32), count, np.full((ROWS, HEADS), 7, np.int32), scope)
    return Ranked(*map(to_jax, state)), to_jax(score), to_jax(steps)


def expected(ranked, score, steps, stride, scored):
    """One head after the other, as a list of slots by age."""
    after = [np.array(x) for x in ranked]
    rank, pos, weight, count, following, scope = after
    slots = rank.shape[-1]
    for row, head in np.ndindex(ROWS, HEADS):
        if count[row, head] <= BUDGET[row]:
            continue
        by_age = list(np.argsort(rank[row, head], kind="stable")[: count[row, head]])
        older = SINKS + scope[row, head]
        mean = [score[row, head, by_age[at]] / max(steps[row, head, by_age[at]], 1) for at in (older, older + 1)]
        gone = by_age.pop(older + 1 if not scored or mean[0] > mean[1] else older)
        rank[row, head] = slots
        rank[row, head, by_age] = np.arange(len(by_age))
        pos[row, head, gone], weight[row, head, gone] = -1, 0
        count[row, head] -= 1
        following[row, head] = gone
        scope[row, head] = (scope[row, head] + stride) % TREE[row]
    return after


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize(
    ("slots", "counts", "stride", "scored"),
    [(16, (12, 10), 1, True), (16, (12, 9), 2, True), (1100, (12, 10), 1, False), (16, (11, 9), 1, True)],
)
def test_evicts_one_of_two_neighbours(implementation, slots, counts, stride, scored):
    ranked, score, steps = draw(slots, counts)
    before = [np.asarray(x) for x in (score, steps)]
    rounding = 1 + 5e-7 * np.random.default_rng(0).standard_normal(score.shape)  # which does not decide
    got = tree_eviction(
        ranked,
        to_jax(before[0] * rounding, jnp.float32),
        steps,
        to_jax(TREE, jnp.int32),
        to_jax(BUDGET, jnp.int32),
        sinks=SINKS,
        stride=stride,
        scored=scored,
        implementation=implementation,
        interpret=implementation != "xla",
    )
    for name, new, wanted in zip(Ranked._fields, got, expected(ranked, *before, stride, scored), strict=True):
        np.testing.assert_array_equal(new, wanted, err_msg=name)
