"""The highest scores of every row, as a mask or as places.

Once JAX drops Pallas' Triton backend: XLA, since Mosaic GPU has no counts along a row that stays in registers across
warps.
"""

from .api import top_k as top_k
from .api import top_k_indices as top_k_indices
