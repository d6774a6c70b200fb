"""Exact causal attention over a prompt (`prefill_attention`), or of a block of a prompt over a cache
(`block_attention`).

Prompts use the flash attention of cuDNN on GPUs and JAX's splash attention on TPUs. Blocks have their own kernels. XLA
computes all other cases.
"""

from .api import block_attention as block_attention
from .api import partial_block_attention as partial_block_attention
from .api import prefill_attention as prefill_attention
from .types import Run as Run
from .types import Stripes as Stripes
