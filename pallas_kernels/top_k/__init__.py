"""The highest scores of every row, as a mask or as places, and the tokens of a query's best clusters, as many as there is room for.

Once JAX drops Pallas' Triton backend: XLA, since Mosaic GPU has no counts or sums along a row that stays in registers across
warps.
"""

from .api import cluster_tokens as cluster_tokens
from .api import top_k as top_k
from .api import top_k_indices as top_k_indices
from .types import Always as Always
