"""Measures of the papers' claims that only benchmarks ask for; those that serve users too are in `kvjax.analysis`."""
