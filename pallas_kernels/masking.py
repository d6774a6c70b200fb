"""The mask value of all attention operations."""

MASKED = -1e30
"""Logit of a masked slot. It is finite, so that a row with nothing to attend to gives zeros instead of NaN."""
