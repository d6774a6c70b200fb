"""Tokens of every chunk merged along edges, and the gaps closed.

Once JAX drops Pallas' Triton backend: XLA's gathers, or the same kernel by way of jax_triton; it moves rows to
computed places, which Mosaic GPU's copies do not.
"""

from .api import copy_clusters as copy_clusters
from .api import merge_clusters as merge_clusters
from .types import Clusters as Clusters
