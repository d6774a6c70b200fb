"""How much the last queries of a prompt attend to each of its tokens.

Once JAX drops Pallas' Triton backend: Mosaic GPU on Hopper and later, whose copy engine brings tiles of keys while
others are multiplied; XLA elsewhere.
"""

from .api import window_scores as window_scores
