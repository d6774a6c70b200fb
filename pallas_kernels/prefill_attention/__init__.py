"""Exact causal attention over a prompt: cuDNN's flash attention where it serves, plain XLA elsewhere."""

from .api import prefill_attention as prefill_attention
