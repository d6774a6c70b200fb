"""A row of a batch gives what it gives alone, to the last slot that is kept: random cases, repeated tokens among them."""

from typing import Any

import jax
import numpy as np
import pytest
from policies.random_cases import draw, read

CASES, SLOW, FAST = 300, 50, 20
NOISE = 1e-7
"""Relative difference that a model's keys have in a batch and alone, of float32's 6e-8."""


def marked(seed: int) -> Any:
    """A case: one of the fast sample, unless it clusters, which compiles for seconds; or of the slow one; or of all."""
    if seed < FAST and "chelsea" not in draw(seed).policy.info.name:
        return pytest.param(seed)
    return pytest.param(seed, marks=pytest.mark.slow if seed < SLOW else pytest.mark.long)


@pytest.mark.rotating  # the fast sample is among the default tests
@pytest.mark.parametrize("seed", [marked(seed) for seed in range(CASES)])
def test_rows_are_what_they_are_alone(seed):
    case = draw(seed)
    outputs, together = read(case, slice(None))
    for i in range(len(case.lengths)):
        alone_outputs, alone = read(case, slice(i, i + 1), NOISE)
        for at, (batch, row) in enumerate(zip(together, alone, strict=True)):
            for layer, (got, want) in enumerate(zip(batch, row, strict=True)):
                told = f"{case.policy.info.name}, {case.kind}, row {i}, layer {layer}, {'after the prompt' if not at else 'end'}"
                for head in range(got[0].shape[1]):
                    kept, kept_alone = (
                        [x[head][w[head] > 0] for x in (p, w)]
                        for p, w in ((got[0][i], got[1][i]), (want[0][0], want[1][0]))
                    )
                    assert kept[0].tolist() == kept_alone[0].tolist(), told
                    # Counts are equal; what is fitted moves with the noise of what it is fitted to.
                    near = 0.01 if case.policy.info.refits_values else 0
                    np.testing.assert_allclose(kept[1], kept_alone[1], rtol=near, err_msg=told)
                for x, y in zip(got[2:], want[2:], strict=True):
                    np.testing.assert_array_equal(x[i], y[0], err_msg=told)
        np.testing.assert_allclose(
            outputs[:, :, i], alone_outputs[:, :, 0], atol=1e-4, err_msg=f"{case.policy.info.name}"
        )
    if seed % 50 == 49:  # else the process comes to have more programs than it may
        jax.clear_caches()
