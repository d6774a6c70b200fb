"""Exact causal attention over a prompt or a block of it: the flash attention of cuDNN or of JAX for TPUs where they serve, kernels of our
own for blocks, plain XLA elsewhere.
"""

from .api import block_attention as block_attention
from .api import partial_block_attention as partial_block_attention
from .api import prefill_attention as prefill_attention
from .types import Run as Run
from .types import Stripes as Stripes
