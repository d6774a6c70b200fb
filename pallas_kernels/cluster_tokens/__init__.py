"""The tokens of a query's best clusters.

Once JAX drops Pallas' Triton backend: XLA, since Mosaic GPU has no sums along a row that stays in registers across
warps.
"""

from .api import cluster_tokens as cluster_tokens
from .types import Always as Always
