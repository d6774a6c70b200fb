"""Clustering of every head's keys, each head for itself.

Once JAX drops Pallas' Triton backend: XLA's sums by segment; Mosaic GPU has no atomic additions to arrays in memory.
"""

from .api import kmeans as kmeans
from .lloyd import Distance as Distance
