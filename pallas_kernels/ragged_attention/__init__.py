"""Attention of one new query a row over KV heads that have caches of different sizes, one after the other in one store."""

from .reference import ragged_attention as ragged_attention
