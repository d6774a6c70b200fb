"""Intervals of means against scipy's own tests, which are other code than the quantiles that they are made of."""

import numpy as np
import pytest

from reproduction.intervals import mean_interval, means_interval


def test_the_interval_of_a_mean_is_students():
    from scipy import stats

    samples = np.random.default_rng(0).normal(1, 2, 7)
    low, high = stats.ttest_1samp(samples, 0).confidence_interval(0.95)
    mean, width = mean_interval(samples)
    assert (mean - width, mean + width) == (pytest.approx(low), pytest.approx(high))
    assert np.isnan(mean_interval([1.0])[1])
    assert mean_interval([2.0, 2.0]) == (2.0, 0.0)


def test_the_interval_of_a_mean_of_means_is_welchs():
    """The half of a sum is the half of a difference with one of both negated, which is what Welch's test is of."""
    from scipy import stats

    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, 5), rng.normal(0, 3, 9)
    low, high = stats.ttest_ind(one, -other, equal_var=False).confidence_interval(0.95)
    mean, width = means_interval([one, other])
    assert (2 * (mean - width), 2 * (mean + width)) == (pytest.approx(low), pytest.approx(high))
