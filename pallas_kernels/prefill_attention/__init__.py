"""Exact causal attention over a prompt: the flash attention of cuDNN or of JAX for TPUs where they serve, plain XLA elsewhere."""

from .api import block_attention as block_attention
from .api import prefill_attention as prefill_attention
