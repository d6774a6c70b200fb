"""Attention of a block of new tokens over what a cache keeps of the text before them, and over the block itself.

Once JAX drops Pallas' Triton backend nothing changes here: there is no such kernel.
"""

from .api import block_attention as block_attention
