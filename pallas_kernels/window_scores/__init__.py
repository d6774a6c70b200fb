"""How much the last queries of a prompt, or all of them, attend to each of its tokens.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of keys while
others are multiplied; XLA elsewhere.
"""

from .api import attention_mass as attention_mass
from .api import window_scores as window_scores
