"""Analyses that only the papers' claims need; those for users are in `kvjax.analysis`."""
