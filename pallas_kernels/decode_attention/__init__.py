"""Attention of one new query a row over the slots of a compressed cache."""

from .reference import decode_attention as decode_attention
