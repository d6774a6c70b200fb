"""Selection of the highest scores of every row, as a mask or as indices, and of the tokens of a query's best clusters.

Most policies choose with these the tokens or pages that they keep or read.

If JAX removes Pallas' Triton backend, XLA replaces these kernels: Mosaic GPU cannot count or sum along a row that stays
in registers across warps.
"""

from .api import cluster_tokens as cluster_tokens
from .api import top_k as top_k
from .api import top_k_indices as top_k_indices
from .types import Always as Always
