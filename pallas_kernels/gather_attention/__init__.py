"""Attention of one new query a row over slots that each head selects from a large cache."""

from .api import gather_attention as gather_attention
