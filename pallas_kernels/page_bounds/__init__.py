"""Least and greatest values of every key channel in pages of tokens, kept as tokens come."""

from .api import widen_bounds as widen_bounds
