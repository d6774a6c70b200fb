"""Scores of blocks of keys: per page from the bounds of its keys (Quest), per cluster from its centroid (ClusterKV).

If JAX removes Pallas' Triton backend, Mosaic GPU can replace these kernels on Hopper and later GPUs: TMA copies tiles
of bounds or centroids while others are multiplied. Other GPUs then use XLA. `widen_bounds` becomes an XLA scatter of
one page per head.
"""

from .api import centroid_scores as centroid_scores
from .api import page_scores as page_scores
from .api import widen_bounds as widen_bounds
