"""Intervals of means against scipy's own tests, which are other code than the quantiles that they are made of."""

import numpy as np
import pytest

from kvjax.evals.intervals import mean_interval, means_interval
from reproduction.claims.claim import _clear
from reproduction.equal_bytes.page import clearly_above


def test_the_interval_of_a_mean_is_students():
    from scipy import stats

    samples = np.random.default_rng(0).normal(1, 2, 7)
    low, high = stats.ttest_1samp(samples, 0).confidence_interval(0.95)
    mean, width = mean_interval(samples)
    assert (mean - width, mean + width) == (pytest.approx(low), pytest.approx(high))
    assert np.isnan(mean_interval([1.0])[1])


def test_ties_prove_little():
    """Of 44 answers that are all the same, up to 6.6 % may yet be others: what the exact interval of a proportion has, too."""
    from scipy import stats

    for count in (2, 20, 44):
        exact = stats.binomtest(0, count).proportion_ci(0.9, method="exact").high  # one-sided: 95 %
        assert mean_interval(np.zeros(count)) == (0.0, pytest.approx(exact))
    assert means_interval([np.ones(20), np.ones(24)]) == (1.0, pytest.approx(exact))
    assert mean_interval([2.0, 2.0]) == (2.0, pytest.approx(0.776, abs=1e-3))
    assert _clear(np.zeros(44) + 0.02) == _clear(np.zeros(2) + 0.02) == "undecided", "no more than 2 % worse"
    assert _clear(np.zeros(200) + 0.02) == _clear(np.ones(2)) == "holds"
    tied = {"vt": np.asarray([0.5, 0.5])}, {"vt": np.zeros(2)}
    assert not clearly_above(*tied)


def test_the_interval_of_a_mean_of_means_is_welchs():
    """The half of a sum is the half of a difference with one of both negated, which is what Welch's test is of."""
    from scipy import stats

    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, 5), rng.normal(0, 3, 9)
    low, high = stats.ttest_ind(one, -other, equal_var=False).confidence_interval(0.95)
    mean, width = means_interval([one, other])
    assert (2 * (mean - width), 2 * (mean + width)) == (pytest.approx(low), pytest.approx(high))
