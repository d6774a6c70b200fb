"""The one number every attention operation masks with."""

MASKED = -1e30
"""Logit of what must not be attended to. Finite, so that a row with nothing to attend to gives zeros rather than NaN."""
