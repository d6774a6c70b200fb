"""Exact causal attention over a prompt."""

from .reference import prefill_attention as prefill_attention
